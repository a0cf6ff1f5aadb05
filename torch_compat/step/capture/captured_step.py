"""A user's step as a graph, and as the JAX functions that programs are built from."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
import torch.utils._pytree as pytree
from jax.sharding import Mesh

from torch_compat.step.capture.step_capture import StepInputs
from torch_compat.step.capture.step_run import StepRun, graph_of, text_of_constant
from torch_compat.step.effects.effects import Record
from torch_compat.step.host.scalar_plan import scalar_inputs
from torch_compat.step.host.slots import BatchSlot, TensorSlot, ValueSlot, indices_of_values
from torch_compat.step.kept_graphs import KeptGraph
from xlatrain.bridge.capture.capture import Capture, Recording, TensorSpec
from xlatrain.bridge.capture.updates import use_updates
from xlatrain.bridge.host_draws import HostDraws, use_drawn
from xlatrain.bridge.lower.index_checks import IndexCheck, IndexFindings, checks_are_on, index_checks
from xlatrain.bridge.lower.interpret import lower
from xlatrain.mesh.mesh import platform
from xlatrain.mesh.pipelining import Pipelining
from xlatrain.step.assumed import Outcomes, outcomes
from xlatrain.step.loss_scale import LossScaleState
from xlatrain.step.stacking import Stacking, StackKey, as_array
from xlatrain.step.state import TrainState
from xlatrain.step.step import GradientOutput, UpdatedOutput, UpdatingFunction, pack_scalars

UpdateOptimizer = Callable[[int, Any, Any, Any, Any, Any], tuple[dict[str, jax.Array], Any]]


@dataclass(frozen=True)
class CapturedStep(StepRun):
    """A run of a step whose graph is made.

    Attributes:
        kept: the graph as it is kept for later runs of the module; None where it is not.
        taken: whether the graph is that of an earlier run of the module.
        audited: the last audit that it has stood in an earlier run, by the number of runs before it.
        redo: functions that leave on the host what this very run has changed there and no record stands for; of an attended step.
    """

    kept: KeptGraph | None = field(default=None, repr=False)
    taken: bool = False
    audited: int = 0
    redo: tuple[Callable[[], None], ...] = ()

    @classmethod
    def of(cls, run: StepRun, inputs: StepInputs, *, take: bool, attended: bool = False) -> CapturedStep:
        """The step of a run, with the graph of an earlier run of the module where that is the same.

        Args:
            inputs: of the run.
            take: whether a graph that is there may be taken.
            attended: whether one of this run of the module counts as taken, too.
        """
        graphs = inputs.graphs
        told = (inputs.form, run.ops, run.outside, run.by_identity)
        kept = graphs.find(*told) if graphs is not None and take else None
        if kept is not None:
            there = {**vars(run), "recording": Recording(lambda: kept.capture)}
            if not (attended or inputs.may_be_kept):  # this run has made it, to compare it with another
                return cls(**there, kept=kept)
            return cls(**there, kept=kept, taken=True, audited=kept.audited((run.text, run.reads)))
        origins = run.recording.origins
        stored = graphs.stored(*told, origins) if graphs is not None and origins and not attended else None
        if stored is not None:
            return cls(**{**vars(run), "recording": Recording(lambda: stored.capture)}, kept=stored)
        graph = graph_of(run)
        kept = None if graphs is None else graphs.keep(*told, graph)
        if graphs is not None and origins and not attended:
            graphs.store(*told, origins, graph)
        run.recording.origins = ()
        return cls(**vars(run), kept=kept)

    @property
    def capture(self) -> Capture:
        """The graph; its result is a dict, see the end of :func:`~torch_compat.step.capture.step_capture.run_step`."""
        return graph_of(self)

    @functools.cached_property
    def value_specs(self) -> tuple[TensorSpec, ...]:
        """The shapes and dtypes of the step's values."""
        return tuple(self.capture.outputs[output.index] for output in self.capture.result["values"])

    def stacking(self, allowed: Callable[[Sequence[str]], bool], pipelining: Pipelining | None = None) -> Stacking | None:
        """The parameters to store stacked, so that the step's repeated layers run as a loop over them; None for none.

        Args:
            allowed: whether parameters of these names may be one stack, as far as the optimizer and the mesh go.
            pipelining: the layers run on stages, in whose order they are stacked.
        """
        found = self.capture.result
        if found["params"]:
            return None  # written in the step, by name
        keys = []
        staged = None if pipelining is None else self.capture.staged(pipelining)
        for positions in (staged or self.capture.rolled).stacked_inputs():
            names = tuple(self.param_names[i] for i in positions if i < len(self.param_names))
            same = len({found["grads"].get(name) is None for name in names}) == 1
            if len(names) == len(positions) and same and allowed(names):
                keys.append(StackKey(names))
        return Stacking(tuple(sorted(keys))) if keys else None

    @functools.cached_property
    def reads_gradients(self) -> bool:
        """Whether it uses gradients that are there when it begins; a step that clears them first does not."""
        inputs = [node for node in self.capture.graph.graph.nodes if node.op == "placeholder"]
        return any(node.users for node in inputs[len(inputs) - len(self.gradient_names) :])

    @functools.cached_property
    def index_checks(self) -> tuple[IndexCheck, ...]:
        """Where the program looks for indices out of range; what they find is at the end of its packed scalars."""
        return index_checks(self.capture) if checks_are_on() else ()

    @functools.cached_property
    def program_text(self) -> str:
        """A digest that is equal for steps that one program can serve, for batches of one form and no :attr:`reads_gradients`."""
        constants = "".join(map(text_of_constant, self.capture.constants.values()))
        made_for = (self.optimizers.fingerprint(), self.scalars.outcomes, self.scalars.is_empty, self.scalars.array_forms)
        made_for += (self.capture.host_draws and tuple(self.capture.host_draws.draws.items()),)
        text = f"{self.capture.computation}{constants}{self.capture.result}{made_for}"
        return hashlib.sha256(text.encode()).hexdigest()

    @functools.cached_property
    def caches(self) -> frozenset[tuple[str, str]]:
        """The ``(owner, attribute)`` that are set to a tensor made of nothing but sizes and numbers: the same whoever sets it."""
        return self.effects.assigned_from(self._made_of_nothing)

    @functools.cached_property
    def cached(self) -> frozenset[int]:
        """The values made of nothing else that are put under keys of dicts, or in attributes, that were not there before, or
        that come in a list, tuple or dict."""
        made = [record.value for record in self.effects.records if record.made]
        alone = {one.index for one in made if isinstance(one, ValueSlot) and one.source == "values"}
        return self._made_of_nothing & alone | self.effects.contained(self._made_of_nothing)

    @functools.cached_property
    def carrying(self) -> tuple[Record, ...]:
        """The changes that put other tensors where they are made."""
        kept = [(record, indices_of_values(record.value)) for record in self.effects.records]
        return tuple(
            record
            for record, values in kept
            if not self._made_of_nothing.issuperset(values)
            or any(isinstance(leaf, BatchSlot | TensorSlot) for leaf in pytree.tree_leaves(record.value))
        )

    @functools.cached_property
    def _made_of_nothing(self) -> frozenset[int]:
        nodes: Any = self.capture.graph.graph.output_node().args[0]
        outputs = enumerate(self.capture.result["values"])
        return frozenset(index for index, output in outputs if _is_made_of_nothing(nodes[output.index]))

    @functools.cached_property
    def used_params(self) -> frozenset[str]:
        """The parameters whose values the graph depends on."""
        inputs = [node for node in self.capture.graph.graph.nodes if node.op == "placeholder"]
        return frozenset(name for name, node in zip(self.param_names, inputs, strict=False) if node.users)

    @functools.cached_property
    def changed(self) -> frozenset[str]:
        """The parameters and buffers that the step and its update may leave with other values."""
        found = self.capture.result
        return frozenset((*found["params"], *found["buffers"], *self.param_names))

    @functools.cached_property
    def differentiated(self) -> frozenset[str]:
        """The parameters that get a gradient."""
        return frozenset(name for name, grad in self.capture.result["grads"].items() if grad is not None)

    def gradient_function(
        self, *, rolled: bool = False, mesh: Mesh | None = None, pipelining: Pipelining | None = None
    ) -> Callable[..., GradientOutput]:
        """The step as ``(params, buffers, batch leaves, key, scalars) -> GradientOutput`` for :mod:`xlatrain.step.step`.

        ``outputs`` is ``(packed scalars float32[n], values)``; ``mesh`` is what it will run on. If
        ``rolled``, repeated layers run as loops, on the stages of ``pipelining`` if there is one; parameters and gradients may
        then be :class:`~xlatrain.step.stacking.Row`.
        """
        capture, param_names, buffer_names = self.capture, self.param_names, self.buffer_names  # not the step: see KeptGraph
        run = lower(capture, rolled=rolled, pipelining=pipelining, **_of_mesh(mesh))
        gradients_of = {leaf.index for leaf in capture.result["grads"].values() if leaf is not None}
        graph_inputs = functools.partial(scalar_inputs, without=self.scalars.is_empty)
        checks = self.index_checks
        assumed = self.scalars.outcomes
        host_draws = capture.host_draws

        def gradients(params: Any, buffers: Any, batch: Sequence[jax.Array], key: jax.Array, scalars: Any) -> GradientOutput:
            trusted, scalars = _trusted(assumed, scalars)
            drawn, scalars = _drawn(host_draws, scalars)
            state = [*(params[name] for name in param_names), *(buffers[name] for name in buffer_names)]
            batch, numbers = _with_numbers(capture, batch)
            inputs = [*state, *batch, *graph_inputs(scalars)]
            findings = IndexFindings(checks)
            with use_drawn(host_draws, drawn):
                given = run(inputs, key, findings, numbers)
            arrays = [x if i in gradients_of else as_array(x) for i, x in enumerate(given)]
            found = capture.unflatten(arrays)
            checked, in_range = findings.packed()
            outputs = (pack_scalars([*found["scalars"], *checked]), found["values"])
            held = _outcomes(assumed, found["assumed"], trusted)
            return GradientOutput(found["grads"], found["buffers"], outputs, found["params"], in_range, held)

        return gradients

    def updating_function(self, update: UpdateOptimizer, *, mesh: Mesh | None = None) -> UpdatingFunction:
        """The step with its own optimizer steps, for :meth:`xlatrain.step.step.StepBuilder.updating`, on ``mesh``.

        Args:
            update: ``(index of the optimizer, grads, opt_state, params, hyper, skip) -> (params, opt_state)``, by parameter
                name; params and grads are those of the parameters that have a gradient; ``skip`` is None or a bool scalar.
        """
        run = lower(self.capture, **_of_mesh(mesh))
        calls, assumed, host_draws = self.optimizers.calls, self.scalars.outcomes, self.capture.host_draws

        def function(state: TrainState, batch: Sequence[jax.Array], key: jax.Array, scalars: Any, hypers: Any) -> UpdatedOutput:
            opt_state = state.opt_state
            trusted, scalars = _trusted(assumed, scalars)
            drawn, scalars = _drawn(host_draws, scalars)

            def update_call(
                call: int, params: Sequence[jax.Array], grads: Sequence[jax.Array], skip: jax.Array | None
            ) -> list[jax.Array]:
                nonlocal opt_state
                names = calls[call].names
                given, gradients = dict(zip(names, params, strict=True)), dict(zip(names, grads, strict=True))
                new, opt_state = update(calls[call].index, gradients, opt_state, given, hypers[call], skip)
                return [new[name] for name in names]

            values = [*(state.params[name] for name in self.param_names), *(state.buffers[name] for name in self.buffer_names)]
            own = [opt_state[name][str(index)][path] for index, name, path in self.state_keys]
            carried = [state.accumulated.get(name) for name in self.gradient_names]  # None: without use
            findings = IndexFindings(self.index_checks)
            with use_updates(update_call), use_drawn(host_draws, drawn):
                batch, numbers = _with_numbers(self.capture, batch)
                given = [*values, *batch, *scalar_inputs(scalars, without=self.scalars.is_empty), *own, *carried]
                found = self.capture.unflatten(run(given, key, findings, numbers))
            outputs = (pack_scalars([*found["scalars"], *findings.packed()[0]]), found["values"])
            opt_state = self.optimizers.with_states(opt_state, found["states"])
            gradients = {name: grad for name, grad in found["grads"].items() if grad is not None}
            loss_scale = LossScaleState(*found["loss_scale"]) if found["loss_scale"] else ()
            held = _outcomes(assumed, found["assumed"], trusted)
            return UpdatedOutput(found["params"], found["buffers"], gradients, opt_state, outputs, loss_scale, held)

        return function


def _with_numbers(capture: Capture, batch: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, Any] | None]:
    """The leaves of a batch, and the numbers that change in the graph, which come after them where there are such."""
    return (batch, None) if capture.bounds is None else (batch[:-2], (batch[-2], batch[-1]))


def _trusted(assumed: Sequence[int], scalars: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """How many outcomes are known (int32 scalar; None where nothing is assumed), and the other scalars."""
    return (scalars[0], scalars[1:]) if assumed else (None, scalars)


def _drawn(host_draws: HostDraws | None, scalars: Sequence[Any]) -> tuple[Sequence[jax.Array], Sequence[Any]]:
    """The numbers that the host has drawn, and the other scalars."""
    return ((), scalars) if host_draws is None else (scalars[0], scalars[1:])


def _outcomes(assumed: Sequence[int], found: Sequence[jax.Array], trusted: jax.Array | None) -> Outcomes | None:
    return None if trusted is None else outcomes(found, assumed, trusted)


def _of_mesh(mesh: Mesh | None) -> dict[str, Any]:
    """The facts that lowerings ask about the mesh."""
    return {} if mesh is None else {"platform": platform(mesh), "partitioned": mesh.devices.size > 1, "mesh": mesh}


def _is_made_of_nothing(node: torch.fx.Node) -> bool:
    """Whether a value depends on no input, no tensor from outside and no draw."""
    todo, seen = [node], {node}
    while todo:
        one = todo.pop()
        if one.op != "call_function" or getattr(one.target, "namespace", "aten") != "aten":
            return False
        new = [before for before in one.all_input_nodes if before not in seen]
        seen.update(new)
        todo += new
    return True
