"""A user's step as a pure function: captured by PyTorch, lowered to JAX.

``capture_training_step`` and ``capture_evaluation_step`` run the user's method once on fake tensors and give a
:class:`CapturedStep`: the graph, what it logs, what it changes and how its result is put together again.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
import torch.utils._pytree as pytree
from torch.nn.utils.stateless import _reparametrize_module

from torch_compat.functional.batch_texts import BatchTexts, place_of
from torch_compat.functional.batches import BatchSpec, flatten_batch
from torch_compat.functional.deferred import Deferred
from torch_compat.functional.effects import EffectRecorder, Effects, Recording, describe
from torch_compat.functional.host_calls import HostCall, HostCalls, is_traced
from torch_compat.functional.host_functions import recording_host_functions
from torch_compat.functional.host_scalars import SLOTS, Env, HostScalar, ScalarPlan, ScalarTracer
from torch_compat.functional.metric_calls import MetricCalls
from torch_compat.functional.recording import LogEntry, LogRecorder
from torch_compat.functional.traced_optimizers import OptimizerTrace
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.capture import Capture, TensorSpec, capture, rehearse
from xlatrain.bridge.interpret import lower
from xlatrain.bridge.op_log import OpLog
from xlatrain.bridge.updates import use_updates
from xlatrain.stacking import Stacking, StackKey, as_array
from xlatrain.state import TrainState
from xlatrain.step import GradientOutput, UpdatedOutput, UpdatingFunction, pack_scalars


@dataclass(frozen=True)
class StepInputs:
    """What a step is captured with.

    Attributes:
        params, buffers: name → a tensor (values are not read) with the parameter's shape, dtype and ``requires_grad``.
        leaves: the batch's tensors, of *global* shape.
        spec: puts the leaves back into the user's batch.
        call: ``(batch, tracer) -> result``, calls the user's method with the tracer's counters.
        env: the loop's counters now.
        scales_loss: the step gets a loss scale as its last input, and gives gradients of the scaled loss.
        backward: ``(loss, differentiate)``, the user's own backward: what it passes to ``differentiate`` is differentiated.
        gradients: name → a tensor like the gradient that the parameter has when the step begins; it is an input of the step.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    leaves: Sequence[torch.Tensor]
    spec: BatchSpec
    call: Callable[[Any, ScalarTracer], Any]
    env: Env
    scales_loss: bool = False
    backward: Callable[[torch.Tensor, Callable[..., None]], Any] | None = None
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CapturedStep:
    """A captured step.

    Attributes:
        capture: the graph. Its result is ``{"scalars", "grads", "params", "buffers", "values", "tokens"}``.
        logs: what it logs.
        effects: tensors that it stores in Python objects, replayed on the host.
        calls: what it calls on the host, see :mod:`torch_compat.functional.host_calls`.
        result: what hooks get as ``outputs``: the user's return value with places into ``values``; of a training step a dict with
            the loss divided by ``accumulate``, and ``{}`` where there is none.
        scalars: what it needs of the loop's counters.
        optimizers: the optimizer steps in it, and what it does on the host before.
        requires_grad: the parameters whose flag it leaves changed, and what it is then.
        gradient_names: the parameters whose gradients are inputs.
        stores_graph: whether it stores a tensor in a Python object that could be differentiated there.
    """

    capture: Capture
    logs: tuple[LogEntry, ...]
    effects: Effects
    calls: tuple[HostCall, ...]
    result: ResultTemplate
    scalars: ScalarPlan
    fingerprint: str = field(repr=False)
    digest: str = field(repr=False)
    param_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    value_specs: tuple[TensorSpec, ...]
    optimizers: OptimizerTrace
    requires_grad: Mapping[str, bool]
    gradient_names: tuple[str, ...]
    stores_graph: bool = False

    def stacking(self, allowed: Callable[[Sequence[str]], bool]) -> Stacking | None:
        """Which parameters to store stacked, so that the step's repeated layers run as a loop over them; None for none.

        Args:
            allowed: whether parameters of these names may be one stack, as far as the optimizer and the mesh go.
        """
        found = self.capture.result
        if found["params"]:
            return None  # written in the step, by name
        keys = []
        for positions in self.capture.rolled.stacked_inputs():
            names = tuple(self.param_names[i] for i in positions if i < len(self.param_names))
            same = len({found["grads"].get(name) is None for name in names}) == 1
            if len(names) == len(positions) and same and allowed(names):
                keys.append(StackKey(names))
        return Stacking(tuple(sorted(keys))) if keys else None

    @functools.cached_property
    def used_params(self) -> frozenset[str]:
        """The parameters whose values the graph depends on."""
        inputs = [node for node in self.capture.graph.graph.nodes if node.op == "placeholder"]
        return frozenset(name for name, node in zip(self.param_names, inputs, strict=False) if node.users)

    @functools.cached_property
    def differentiated(self) -> frozenset[str]:
        """The parameters that get a gradient."""
        return frozenset(name for name, grad in self.capture.result["grads"].items() if grad is not None)

    def gradient_function(self, *, rolled: bool = False) -> Callable[..., GradientOutput]:
        """The step as ``(params, buffers, batch leaves, key, scalars) -> GradientOutput`` for :mod:`xlatrain.step`.

        ``outputs`` is ``(packed scalars float32[n], values)``. If ``rolled``, repeated layers run as loops; parameters and
        gradients may then be :class:`~xlatrain.stacking.Row`.
        """
        run = lower(self.capture, rolled=rolled)
        gradients_of = {leaf.index for leaf in self.capture.result["grads"].values() if leaf is not None}

        def gradients(params: Any, buffers: Any, batch: Sequence[jax.Array], key: jax.Array, scalars: Any) -> GradientOutput:
            scalars = self.scalars.graph_inputs(scalars)
            state = [*(params[name] for name in self.param_names), *(buffers[name] for name in self.buffer_names)]
            inputs = [*state, *batch, *scalars]
            arrays = [x if i in gradients_of else as_array(x) for i, x in enumerate(run(inputs, key))]
            found = self.capture.unflatten(arrays)
            outputs = (pack_scalars(found["scalars"]), found["values"])
            return GradientOutput(found["grads"], found["buffers"], outputs, found["params"])

        return gradients

    def updating_function(self, update: UpdateOptimizer) -> UpdatingFunction:
        """The step with its own optimizer steps, for :meth:`xlatrain.step.StepBuilder.updating`.

        Args:
            update: ``(index of the optimizer, grads, opt_state, params, hyper) -> (params, opt_state)``, by parameter name;
                params and grads are those of the parameters that have a gradient.
        """
        run = lower(self.capture)
        calls = self.optimizers.calls

        def function(state: TrainState, batch: Sequence[jax.Array], key: jax.Array, scalars: Any, hypers: Any) -> UpdatedOutput:
            opt_state = state.opt_state

            def update_call(call: int, params: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
                nonlocal opt_state
                names = calls[call].names
                given, gradients = dict(zip(names, params, strict=True)), dict(zip(names, grads, strict=True))
                new, opt_state = update(calls[call].index, gradients, opt_state, given, hypers[call])
                return [new[name] for name in names]

            values = [*(state.params[name] for name in self.param_names), *(state.buffers[name] for name in self.buffer_names)]
            carried = [state.accumulated[name] for name in self.gradient_names]
            with use_updates(update_call):
                given = [*values, *batch, *self.scalars.graph_inputs(scalars), *carried]
                found = self.capture.unflatten(run(given, key))
            outputs = (pack_scalars(found["scalars"]), found["values"])
            gradients = {name: grad for name, grad in found["grads"].items() if grad is not None}
            return UpdatedOutput(found["params"], found["buffers"], gradients, opt_state, outputs)

        return function


UpdateOptimizer = Callable[[int, Any, Any, Any, Any], tuple[dict[str, jax.Array], Any]]


@dataclass(frozen=True)
class ResultTemplate:
    """The user's return value with places where its tensors, counters and parts of the batch were."""

    tree: Any


@dataclass(frozen=True)
class ValuePlace:
    """Stands for the ``index``-th value of a captured step in what it returns or stores."""

    index: int


@dataclass(frozen=True)
class ScalarPlace:
    """Stands for the ``index``-th of the packed scalars, float32."""

    index: int


@dataclass(frozen=True)
class CounterPlace:
    """Stands for an expression over the loop's counters; ``text`` is what tells it from others."""

    expression: Callable[[Env], Any] = field(compare=False, repr=False)
    text: str


@dataclass(frozen=True)
class BatchPlace:
    """Stands for the ``index``-th leaf of the batch that is no tensor, or for the part of it that ``path`` leads to."""

    index: int
    path: tuple[Any, ...] = ()

    def find(self, others: Sequence[Any]) -> Any:
        return functools.reduce(lambda value, key: value[key], self.path, others[self.index])


_Grads = dict[str, torch.Tensor | None]


@dataclass
class _Trace:
    """What one run of the user's Python left behind, besides the graph."""

    calls: HostCalls = field(default_factory=HostCalls)
    effects: Effects = field(default_factory=Effects)
    made: tuple[HostCall, ...] = ()
    values: list[torch.Tensor] = field(default_factory=list)
    graphs: list[bool] = field(default_factory=list)  # for each value whether it could be differentiated
    stores_graph: bool = False
    result: Any = None
    scalars: ScalarPlan = field(default_factory=ScalarPlan)
    optimizers: OptimizerTrace = field(default_factory=OptimizerTrace)

    def __post_init__(self) -> None:
        self.metrics = MetricCalls(self.calls)
        self.logs = LogRecorder(self.calls, self.metrics)

    def template(self, tree: Any, batch: Sequence[Any] = ()) -> Any:
        """``tree`` with places for what differs from step to step.

        That is its traced tensors (outputs of the step from now on), counters, and leaves of the ``batch`` that are no tensors.
        """
        positions = {id(leaf): index for index, leaf in enumerate(batch) if not isinstance(leaf, _ATOMS)}

        def place(leaf: Any) -> Any:
            if id(leaf) in positions:
                return BatchPlace(positions[id(leaf)])
            if (path := place_of(leaf)) is not None:
                return BatchPlace(path[0], path[1:])
            if type(leaf) is HostScalar:
                return CounterPlace(*leaf.deferred())
            if type(leaf) is Deferred:
                return leaf.place()
            if type(leaf) is str:
                return self.calls.text_place(leaf)
            if is_traced(leaf):
                self.values.append(leaf.detach())
                self.graphs.append(leaf.requires_grad)
                return ValuePlace(len(self.values) - 1)
            return leaf

        return pytree.tree_map(place, tree, is_leaf=lambda node: id(node) in positions)

    def finish(self, recording: Recording, template: Callable[[Any], Any]) -> None:
        """Put places into everything that outlives the capture.

        Raises:
            CaptureError: something in it cannot be repeated after every step.
        """
        self.made = self.calls.finish(template)
        self.result = template(self.result)
        returned = len(self.values)
        self.effects = recording.effects(template)
        self.stores_graph = any(self.graphs[returned:])
        self.metrics.finish(self.calls.used)
        self.calls.check_texts()
        self.calls.closed = True

    def text(self) -> str:
        """What must be the same in every run of the step, besides its graph."""
        calls = _texts_of(self.made)
        parts = (self.logs.fingerprint(), self.effects.fingerprint(), calls, self.scalars.texts, self.optimizers.fingerprint())
        return "\n".join([*map(str, parts), describe(self.result)])


_ATOMS = (bool, int, float, complex, str, bytes, type(None))


def capture_training_step(
    module: torch.nn.Module, inputs: StepInputs, recorder: EffectRecorder, context: TraceContext, *, accumulate: int
) -> CapturedStep:
    """Capture forward and backward of an automatically optimized training step.

    Args:
        accumulate: the loss is divided by this number of accumulated batches, as Lightning does, before the backward pass.

    Raises:
        MisconfigurationException: ``training_step`` returned something else than a loss, a dict with ``"loss"``, or None.
        CaptureError: see :func:`xlatrain.bridge.capture.capture`.
    """

    def body(trace: _Trace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> _Grads:
        output = inputs.call(batch, tracer)
        loss = closure_loss(output)
        wanted = [name for name, value in values.items() if value.requires_grad]
        if loss is None:
            trace.result = {}
            return dict.fromkeys(wanted)
        objective = loss / accumulate
        seen = ScalarPlace(trace.logs.add(objective)) if loss.dtype == torch.float32 else objective
        trace.result = {**(output if isinstance(output, Mapping) else {}), "loss": seen}
        if not loss.requires_grad:
            raise MisconfigurationException(
                "the loss returned by training_step does not depend on any parameter that requires grad: nothing to train. "
                "Look for a detach(), a no_grad block, or frozen parameters."
            )
        scaled = objective if tracer.loss_scale is None else objective * tracer.loss_scale
        inner = [values[name] for name in wanted]
        if inputs.backward is None:
            grads = torch.autograd.grad(scaled, inner, allow_unused=True)
        else:
            grads = _through(inputs.backward, scaled, inner)
        return dict(zip(wanted, grads, strict=True))

    with torch.enable_grad():
        return _capture(module, inputs, recorder, context, body)


def capture_updating_step(
    module: torch.nn.Module, inputs: StepInputs, recorder: EffectRecorder, context: TraceContext
) -> CapturedStep:
    """Capture a training step that runs backward and its optimizers itself (manual optimization).

    Gradients are what ``.grad`` of the parameters is at its end.
    """

    def body(trace: _Trace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> _Grads:
        trace.result = inputs.call(batch, tracer)
        return {name: value.grad for name, value in values.items()}

    with torch.enable_grad():
        return _capture(module, inputs, recorder, context, body)


def _through(
    backward: Callable[[torch.Tensor, Callable[..., None]], Any], loss: torch.Tensor, values: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of everything that the user's own backward differentiates, added up; None where there is none."""
    grads: list[torch.Tensor | None] = [None] * len(values)

    def add(found: Sequence[torch.Tensor | None]) -> None:
        for index, (old, new) in enumerate(zip(grads, found, strict=True)):
            grads[index] = new if old is None else old if new is None else old + new

    def differentiate(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if args or set(kwargs) - {"retain_graph"}:
            raise MisconfigurationException(
                f"backward was given {[*args, *kwargs]}: a compiled step differentiates the loss itself; retain_graph at most"
            )
        add(torch.autograd.grad(loss, values, allow_unused=True, retain_graph=True))

    backward(loss, differentiate)
    add([value.grad for value in values])  # what loss.backward() left
    return grads


def capture_evaluation_step(
    module: torch.nn.Module, inputs: StepInputs, recorder: EffectRecorder, context: TraceContext
) -> CapturedStep:
    """Capture a validation, test or predict step, without gradients."""

    def body(trace: _Trace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> _Grads:
        trace.result = inputs.call(batch, tracer)
        return {}

    with torch.no_grad():
        return _capture(module, inputs, recorder, context, body)


def capture_call(
    module: torch.nn.Module, inputs: StepInputs, recorder: EffectRecorder, context: TraceContext, wanted: Sequence[int]
) -> tuple[CapturedStep, tuple[int, ...]]:
    """Capture a call of a module whose outputs may be differentiated on the host, by :func:`capture_call_backward`.

    Args:
        wanted: the batch's tensors, by position, that require gradients.

    Returns:
        The step, and which of its values are results that depend on a parameter or on such a tensor.
    """
    flags: list[bool] = []

    def body(trace: _Trace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> _Grads:
        trace.result = inputs.call(_requiring_grad(batch, wanted)[0], tracer)
        flags[:] = [leaf.requires_grad for leaf in pytree.tree_leaves(trace.result) if is_traced(leaf)]
        return {}

    with torch.enable_grad():
        step = _capture(module, inputs, recorder, context, body)
    places = [leaf.index for leaf in pytree.tree_leaves(step.result.tree) if isinstance(leaf, ValuePlace)]
    return step, tuple(place for place, flag in zip(places, flags, strict=True) if flag)


def capture_call_backward(
    module: torch.nn.Module, inputs: StepInputs, recorder: EffectRecorder, context: TraceContext, wanted: Sequence[int]
) -> CapturedStep:
    """Capture the backward pass of a module's call, which computes the call again.

    The batch is ``(the call's batch, cotangents of its differentiable results)``. ``grads`` are those of the parameters, the
    result is the list of those of the ``wanted`` tensors, None where the results do not depend on one.
    """

    def body(trace: _Trace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> _Grads:
        arguments, cotangents = batch
        arguments, given = _requiring_grad(arguments, wanted)
        found = [leaf for leaf in pytree.tree_leaves(inputs.call(arguments, tracer)) if is_traced(leaf) and leaf.requires_grad]
        names = [name for name, value in values.items() if value.requires_grad]
        inner = [*(values[name] for name in names), *given]
        grads = torch.autograd.grad(found, inner, cotangents, allow_unused=True)
        trace.result = list(grads[len(names) :])
        return dict(zip(names, grads[: len(names)], strict=True))

    with torch.enable_grad():
        return _capture(module, inputs, recorder, context, body)


def _requiring_grad(batch: Any, wanted: Sequence[int]) -> tuple[Any, list[torch.Tensor]]:
    """The batch with its ``wanted`` tensors requiring gradients, and these."""
    if not wanted:
        return batch, []
    leaves, spec = flatten_batch(batch)
    for index in wanted:
        leaves[index] = leaves[index].detach().requires_grad_(True)
    return spec.unflatten(leaves), [leaves[index] for index in wanted]


@dataclass(frozen=True)
class TraceContext:
    """What surrounds the user's Python while it is captured.

    Attributes:
        live: name → traced tensor is active for live parameters (see :mod:`xlatrain.bridge.live`).
        logging: directs ``self.log`` into a recorder, and gives ``trainer.global_step`` and its like the tracer's counters.
        forward: the precision plugin's forward context.
        optimizers: puts stand-ins of optimizers and schedulers in place, given the traced parameters.
    """

    live: Callable[[Mapping[str, torch.Tensor]], contextlib.AbstractContextManager[Any]]
    logging: Callable[[LogRecorder, ScalarTracer], contextlib.AbstractContextManager[Any]]
    forward: Callable[[], contextlib.AbstractContextManager[Any]]
    optimizers: Callable[[ScalarTracer, Mapping[str, torch.Tensor]], contextlib.AbstractContextManager[OptimizerTrace]]


class _Rehearsed(BaseException):
    """Carries the digest of a rehearsal out of a capture; nothing of the user's is on the way."""


_REHEARSING = contextvars.ContextVar("xlatrain_rehearsing", default=False)


def digest_of(recapture: Callable[[], CapturedStep]) -> str:
    """The digest that ``recapture()`` would have now, found without making a graph.

    Where it equals :attr:`CapturedStep.digest`, so would the fingerprints; where not, they may still be equal.
    """
    token = _REHEARSING.set(True)
    try:
        recapture()
    except _Rehearsed as rehearsed:
        return str(rehearsed)
    finally:
        _REHEARSING.reset(token)
    raise AssertionError("a recapture captures a step")


_Body = Callable[[_Trace, Mapping[str, torch.Tensor], Any, ScalarTracer], _Grads]


def _capture(
    module: torch.nn.Module, inputs: StepInputs, recorder: EffectRecorder, context: TraceContext, body: _Body
) -> CapturedStep:
    trace = _Trace()

    flags = {name: param.requires_grad for name, param in inputs.params.items()}
    changed_flags: dict[str, bool] = {}
    digest = ""

    def traced(
        params: list[torch.Tensor],
        buffers: list[torch.Tensor],
        leaves: list[torch.Tensor],
        scalars: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> dict[str, Any]:
        nonlocal digest
        tracer = ScalarTracer(inputs.env, *scalars)
        trace.scalars = tracer.plan
        values = {name: value.detach().requires_grad_(flags[name]) for name, value in zip(inputs.params, params, strict=True)}
        _take_over_hooks(inputs.params, values)
        for name, gradient in zip(inputs.gradients, gradients, strict=True):
            values[name].grad = gradient.detach()
        state = dict(zip(inputs.buffers, buffers, strict=True))
        before = dict(state)
        with (
            OpLog([*params, *buffers, *leaves, *scalars, *gradients]) as log,
            context.live({**values, **state}),
            context.logging(trace.logs, tracer),
            context.optimizers(tracer, values) as trace.optimizers,
            _reparametrize_module(module, {**values, **state}, tie_weights=True),
        ):
            with (
                context.forward(),
                recorder.recording() as recording,
                trace.metrics.recording(),
                recording_host_functions(trace.calls),
            ):
                texts = BatchTexts(tracer)
                batch = inputs.spec.unflatten(leaves, texts.wrap_leaf)
                grads = body(trace, values, batch, tracer)
            changed = _changed_buffers(module, before, state)
            trace.finish(recording, functools.partial(trace.template, batch=inputs.spec.others))
            texts.finish()
            changed_flags.update({n: v.requires_grad for n, v in values.items() if v.requires_grad != flags[n]})
            now = dict(module.named_buffers())
            outcome = (
                trace.logs.scalars,
                grads,
                trace.values,
                trace.optimizers.tokens,
                [now.get(n, b) for n, b in state.items()],
            )
            digest = log.digest(outcome)
        written = {name: value.detach() for name, value in values.items() if _was_written(value)}
        tokens = trace.optimizers.tokens
        values_out = {"scalars": trace.logs.scalars, "values": trace.values, "tokens": tokens}
        return {"grads": grads, "params": written, "buffers": changed, **values_out}

    arguments = (
        [_spec(p) for p in inputs.params.values()],
        [_spec(b) for b in inputs.buffers.values()],
        list(inputs.leaves),
        _scalar_specs(inputs.scales_loss),
        [_spec(gradient) for gradient in inputs.gradients.values()],
    )
    if _REHEARSING.get():
        rehearse(traced, *arguments)
        raise _Rehearsed(f"{digest}\n{trace.text()}\n{changed_flags}")
    graph = capture(traced, *arguments)
    text = f"{trace.text()}\n{changed_flags}"
    return CapturedStep(
        capture=graph,
        logs=tuple(trace.logs.entries),
        effects=trace.effects,
        calls=trace.made,
        result=ResultTemplate(trace.result),
        scalars=trace.scalars,
        fingerprint=f"{graph.graph.code}\n{text}",
        digest=f"{digest}\n{text}",
        param_names=tuple(inputs.params),
        buffer_names=tuple(inputs.buffers),
        value_specs=tuple(graph.outputs[place.index] for place in graph.result["values"]),
        optimizers=trace.optimizers,
        requires_grad=changed_flags,
        gradient_names=tuple(inputs.gradients),
        stores_graph=trace.stores_graph,
    )


def _texts_of(calls: Sequence[HostCall]) -> str:
    """What must be the same of host calls in every capture of the step."""
    return "\n".join(f"{call.text} {describe((call.args, call.kwargs))}" for call in calls)


def _take_over_hooks(params: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Hooks that were registered on parameters run on their gradients in the captured step."""
    with torch._C.DisableTorchFunctionSubclass():  # live parameters: looked at, not read
        for name, param in params.items():
            for hook in (param._backward_hooks or {}).values():
                values[name].register_hook(hook)
            for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                values[name].register_post_accumulate_grad_hook(hook)


def _scalar_specs(scales_loss: bool) -> list[torch.Tensor]:
    """Shapes and dtypes of the scalar inputs: whole numbers, fractions and, if wanted, the loss scale."""
    specs = [torch.empty(SLOTS, dtype=torch.int64, device="meta"), torch.empty(SLOTS, dtype=torch.float32, device="meta")]
    return [*specs, torch.empty((), dtype=torch.float32, device="meta")] if scales_loss else specs


def _spec(tensor: torch.Tensor) -> torch.Tensor:
    """Shape and dtype of a parameter without touching its values."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _changed_buffers(
    module: torch.nn.Module, before: Mapping[str, torch.Tensor], traced: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Buffers that the step wrote to, in place or by assignment, with their new values."""
    now = dict(module.named_buffers())
    changed = {}
    for name, value in before.items():
        current = now.get(name, value)
        if current is not value or _was_written(value):
            changed[name] = current.to(value.dtype)
    return changed


def _was_written(tensor: torch.Tensor) -> bool:
    """Whether a functional tensor was changed in place since the capture began."""
    elem: Any = getattr(tensor, "elem", None)
    if elem is None:
        return False
    functionalize: Any = torch
    return functionalize._functionalize_has_data_mutation(elem) or functionalize._functionalize_was_storage_changed(elem)


def closure_loss(output: Any) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned: a tensor, a mapping with ``"loss"``, or None to skip the batch.

    Raises:
        MisconfigurationException: anything else.
    """
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if type(loss) is Deferred:
        reason = "the loss depends on this value, which is computed on the host (a torchmetrics result, .numpy(), …)"
        raise loss.refusal(reason, at_origin=True)
    if isinstance(output, Mapping) and "loss" not in output:
        raise MisconfigurationException(
            f"training_step returned a dict without the key 'loss' (its keys: {sorted(map(str, output))}); "
            "return the loss, a dict with 'loss', or None to skip the batch"
        )
    if not isinstance(loss, torch.Tensor):
        raise MisconfigurationException(
            f"training_step returned {type(loss).__name__}; expected a scalar tensor (the loss), a dict with the key 'loss', "
            "or None to skip the batch"
        )
    if loss.numel() != 1:
        raise MisconfigurationException(
            f"the loss returned by training_step has shape {tuple(loss.shape)}; expected a single number: reduce it, e.g. "
            "loss.mean()"
        )
    return loss.reshape(())
