"""An optimizer that has no update rule: its own ``step()``, captured by PyTorch and lowered to JAX."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import _global_optimizer_post_hooks

from torch_compat.step.effects.recorder import EffectRecorder, Recording
from torch_compat.step.host.tensor_scalars import TensorScalars
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer, Gradients, Params, real_dtype
from torch_compat.step.optimizers.param_group import (
    TracedOptions,
    UnsupportedOptimizerError,
    frozen,
    name_of,
    refuse_differentiable,
)
from torch_compat.step.optimizers.read_places import ReadPlaces
from torch_compat.step.optimizers.state import make_state, place_state, place_unread, scalars_on_host
from torch_compat.step.optimizers.state_layout import StateLayout, as_array, exported_leaf, is_array, layout_of, shape_of
from torch_compat.step.values.user_objects import objects_around
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.capture.stand_ins import as_parameters, standing_for
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.patches import patched
from xlatrain.bridge.tensors.dtypes import jax_dtype, torch_dtype
from xlatrain.step.optimizers.rule import State

OptimizerState = dict[str, State]

AS_TRACED = {"foreach": False, "fused": False, "capturable": True}
"""Options that choose among implementations, and the choice that is traceable."""
_OURS = frozenset({"param_groups", "state", "_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
"""Attributes of the optimizer that capturing replaces, or that say nothing about its step."""
_MAX_PROGRAMS = 8
"""How often a number that cannot be an input may change before the compiled step gives up."""


@dataclass(frozen=True)
class _Program:
    """A captured variant of the step."""

    capture: Capture
    run: Callable[..., list[jax.Array]]
    layouts: dict[str, StateLayout]


class CapturedOptimizer(FunctionalOptimizer):
    """An optimizer by its own Python code.

    ``step()`` runs on fake tensors: once for parameters without state (where it makes the state), once for those that have
    it. State is what it puts into ``self.state[p]``: tensors and numbers become arrays. Of the group options the learning
    rate is an input of the program; any other number becomes one when it first changes. Numbers that the code must know
    as numbers (``if lr > 0``, ``math.sqrt(lr)``) are constants instead, and a program is made for each value of theirs. So is
    one for each state of what else the step reads (:class:`~.read_places.ReadPlaces`).
    Arithmetic on numbers happens in float32, where eager torch computes in double, and in float64 where a parameter is.
    """

    makes_state_in_step = True

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__(optimizer, names)
        self._programs: dict[Hashable, _Program] = {}
        self._layouts: dict[str, StateLayout] = {}
        self._options = TracedOptions()
        self._seen_besides: tuple[Any, Hashable] = ((), 0)
        self._seen_numbers: list[Any] = []
        self._places = ReadPlaces(f"{type(optimizer).__name__}.step", self._attributes)
        self._constants_seen: set[Hashable] = set()
        self._real = real_dtype(names)
        self._vector = np.zeros(0, self._real)
        self._key: Hashable = ()
        self._read()
        self._try()

    # -- options -----------------------------------------------------------------------------------------------------

    def options(self) -> tuple[np.ndarray, Hashable]:
        self._read()
        return self._vector, self._key

    def _read(self) -> None:
        """Bring the vector and the key up to date with the param groups."""
        changed = self._options.read(self.optimizer.param_groups)
        members = tuple(tuple(map(id, group["params"])) for group in self.optimizer.param_groups)
        besides = (members, self._places.state())
        numbers = [one.value() for one in self._places.inputs]
        if not changed and besides == self._seen_besides and numbers == self._seen_numbers:
            return
        self._seen_besides, self._seen_numbers = besides, numbers
        for index, group in enumerate(self.optimizer.param_groups):
            refuse_differentiable(group, index)
        self._vector = np.asarray([*self._options.numbers(), *numbers], self._real)
        self._vector.flags.writeable = False
        fixed = self._options.fixed()
        if self._options.constant:
            self._constants_seen.add(fixed)
        self._key = (besides, type(self.optimizer), fixed, frozenset(self._options.inputs))

    def check(self) -> None:
        super().check()
        self._places.check()
        if len(self._constants_seen) > _MAX_PROGRAMS:
            raise UnsupportedOptimizerError(
                f"{type(self.optimizer).__name__}.step needs its options as Python numbers, and they change from step to step "
                f"({len(self._constants_seen)} values seen): each would be another compilation. Write the step with tensor "
                "arithmetic only (no math.sqrt(lr), no 'if' on an option), or run with XLATRAIN_EXECUTOR=eager"
            )

    def _attributes(self) -> list[dict[str, Any]]:
        """The ``__dict__`` of the optimizer and of each of its parameters."""
        return [vars(one) for one in (self.optimizer, *self._members().values())]

    # -- the step ----------------------------------------------------------------------------------------------------

    def init(self, params: Params) -> OptimizerState:
        """An empty state: no parameter has any before its first gradient, with which the step makes it."""
        return {name: {} for name in self._members() if name in params}

    def update(
        self, grads: Gradients, opt_state: OptimizerState, params: Params, hyper: jax.Array
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        self._read()
        stepped = [name for name in self._members() if grads.get(name) is not None]
        if not stepped:
            return dict(params), dict(opt_state)
        state = {name: opt_state.get(name, {}) for name in stepped}
        program = self._program({name: params[name] for name in stepped}, state)
        scalars = [] if self._options.constant else [hyper[index] for index in range(len(self._vector))]
        arrays = [array for name in stepped for array in (params[name], jnp.asarray(grads[name], params[name].dtype))]
        arrays += [state[name][path] for name in stepped for path, kind in self._leaves(name, state) if is_array(kind)]
        new_values, new_states = program.capture.unflatten(program.run([*arrays, *scalars], None))
        new_params, new_state = dict(params), dict(opt_state)
        for name, value, leaves in zip(stepped, new_values, new_states, strict=True):
            new_params[name] = value
            layout = program.layouts[name]
            new_state[name] = {
                path: as_array(leaf, self._real)
                for (path, kind), leaf in zip(layout.leaves, leaves, strict=True)
                if is_array(kind)
            }
        self._layouts.update(program.layouts)
        return new_params, new_state

    def _leaves(self, name: str, state: Mapping[str, State]) -> tuple[tuple[str, Any], ...]:
        return self._layouts[name].leaves if state[name] else ()

    def _program(self, params: Params, state: Mapping[str, State]) -> _Program:
        """The variant for these parameters and this state; captured at most once."""
        key = (self._key, tuple((name, param.shape, param.dtype.name, tuple(state[name])) for name, param in params.items()))
        if key not in self._programs:
            self._programs[key] = self._captured(params, state)
        return self._programs[key]

    def _captured(self, params: Params, state: Mapping[str, State]) -> _Program:
        try:
            return self._capture(params, state)
        except UnsupportedOptimizerError:
            raise
        except Exception as error:  # the user's code runs in there
            if self._places.compare_inputs():
                self._read()
                return self._captured(params, state)
            if self._options.constant or not len(self._vector):
                raise self._refusal(error) from error
        # Once more with every option as a plain number: constants, and another program when one changes.
        self._options.constant = True
        self._options.groups = []
        self._read()
        try:
            return self._capture(params, state)
        except UnsupportedOptimizerError:
            raise
        except Exception as error:
            raise self._refusal(error) from error

    def _try(self) -> None:
        """Capture a first and a later step of all trainable parameters: what cannot be captured is known before the first step.

        Raises:
            UnsupportedOptimizerError: the step cannot be captured.
        """
        trained = {name: param for name, param in self._members().items() if param.requires_grad}
        if not trained:
            return
        params: Any = {n: jax.ShapeDtypeStruct(tuple(p.shape), jax_dtype(p.dtype)) for n, p in trained.items()}
        program = self._program(params, {name: {} for name in params})
        self._layouts.update(program.layouts)
        results = jax.tree.map(
            lambda leaf: shape_of(leaf, self._real), program.capture.unflatten(list(program.capture.outputs))[1]
        )
        state: Any = {
            name: {path: leaf for (path, kind), leaf in zip(program.layouts[name].leaves, leaves, strict=True) if is_array(kind)}
            for name, leaves in zip(params, results, strict=True)
        }
        self._program(params, state)

    def _refusal(self, error: BaseException) -> UnsupportedOptimizerError:
        return UnsupportedOptimizerError(
            f"{type(self.optimizer).__name__}.step cannot be captured into a compiled step: {type(error).__name__}: {error}\n"
            "Use one of torch.optim's own optimizers, or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
        )

    def _capture(self, params: Params, state: Mapping[str, State]) -> _Program:
        layouts: dict[str, StateLayout] = {}
        names = list(params)

        def step(pairs: list[torch.Tensor], leaves: list[torch.Tensor], scalars: list[torch.Tensor]) -> tuple[Any, Any]:
            members = self._members()
            tensors = {name: standing_for(traced, members[name]) for name, traced in zip(names, pairs[::2], strict=True)}
            for tensor, grad in zip(pairs[::2], pairs[1::2], strict=True):
                tensor.grad = grad
            given = iter(leaves)
            states = {name: self._rebuilt(name, given) if state[name] else {} for name in names}
            with (
                self._stand_ins(tensors, states, scalars) as live_state,
                torch.no_grad(),
                TensorScalars(),
                as_if_compiled(),
                as_parameters(),
            ):
                with EffectRecorder(self._surroundings()).recording() as recording:
                    noted(self.optimizer.step)()
                self._refuse_effects(recording)
                found = {name: live_state.get(tensors[name], {}) for name in names}
            layouts.update({name: layout_of(found[name], self._layouts.get(name)) for name in names})
            return list(tensors.values()), [pytree.tree_leaves(found[name]) for name in names]

        self._refuse_hidden_parameters()
        pairs = [_meta(param) for param in params.values() for _ in range(2)]
        leaves = [_meta(state[n][path]) for n in names for path, kind in self._leaves(n, state) if is_array(kind)]
        scalars = (
            []
            if self._options.constant
            else [torch.empty((), dtype=torch_dtype(self._real), device="meta") for _ in self._vector]
        )
        with self._places.observed() as noted:
            captured = capture(step, pairs, leaves, scalars)
        self._places.add_constants(captured.constants.values())
        if captured.uses_random:
            raise UnsupportedOptimizerError(
                f"{type(self.optimizer).__name__}.step draws random numbers, which the compiled update does not provide; "
                "run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )
        self._refuse_unused_gradients(captured, names)
        return _Program(captured, lower(captured), layouts)

    def _surroundings(self) -> dict[str, Any]:
        replaced = {f"self.{name}" for name in _OURS}
        return {name: value for name, value in objects_around(self.optimizer).items() if name not in replaced}

    def _refuse_effects(self, recording: Recording) -> None:
        """Refuse a step whose Python fills lists or sets attributes, which would happen only once."""
        effects = recording.effects(lambda tree: tree)
        if effects.refusal:
            raise UnsupportedOptimizerError(f"{type(self.optimizer).__name__}.step: {effects.refusal}")
        if effects:
            raise UnsupportedOptimizerError(
                f"{type(self.optimizer).__name__}.step changes {effects.records[0].place}, which a compiled step would do only "
                "once; do it in the hook on_before_optimizer_step, or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )

    def _refuse_hidden_parameters(self) -> None:
        """Refuse parameters that the step reaches by another way than its param groups: it would work on stale values."""
        for key, value in vars(self.optimizer).items():
            if key in _OURS:
                continue
            leaves = pytree.tree_leaves(value)
            if any(isinstance(leaf, torch.optim.Optimizer) for leaf in leaves):
                raise UnsupportedOptimizerError(
                    f"{type(self.optimizer).__name__} wraps another optimizer (self.{key}), whose step would not be part of the "
                    "compiled step; use the inner optimizer alone, or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
                )
            if any(isinstance(leaf, torch.Tensor) and leaf in self._names for leaf in leaves):
                raise UnsupportedOptimizerError(
                    f"{type(self.optimizer).__name__} keeps parameters in self.{key}; a compiled step has others in their "
                    "place: read them from self.param_groups, or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
                )

    def _refuse_unused_gradients(self, captured: Capture, names: list[str]) -> None:
        placeholders = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
        unused = [name for name, node in zip(names, placeholders[1 : 2 * len(names) : 2], strict=True) if not node.users]
        if unused:
            raise UnsupportedOptimizerError(
                f"{type(self.optimizer).__name__}.step makes no use of the gradients of {', '.join(unused)}; does it reach its "
                "parameters by another way than self.param_groups? Run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )

    def _rebuilt(self, name: str, given: Iterator[torch.Tensor]) -> dict[str, Any]:
        """The state dict of one parameter, with traced tensors from ``given`` in place of its arrays and numbers."""
        layout = self._layouts[name]
        leaves = [next(given) if is_array(kind) else kind for _, kind in layout.leaves]
        return pytree.tree_unflatten(leaves, layout.spec)

    @contextlib.contextmanager
    def _stand_ins(
        self, tensors: Mapping[str, torch.Tensor], states: Mapping[str, dict[str, Any]], scalars: list[torch.Tensor]
    ) -> Iterator[Any]:
        """The optimizer with traced tensors for parameters, state and lifted options; as it was afterwards.

        Raises:
            UnsupportedOptimizerError: the step changed an attribute or a group option, which would happen only once.
        """
        optimizer = self.optimizer
        held = {id(vars(optimizer)): vars(optimizer)}
        held |= {id(vars(param)): vars(tensors[name]) for name, param in self._members().items() if name in tensors}
        replaced = {key: value for key, value in vars(optimizer).items() if key in _OURS}
        before = {key: value for key, value in vars(optimizer).items() if key not in _OURS}
        given = iter(scalars)
        traced_groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            options |= {key: value for key, value in AS_TRACED.items() if key in options}
            options |= {
                key: _with_tensors(frozen(group[key]), given)
                for key in options
                if self._options.is_input(key, frozen(group[key]))
            }
            members = [tensors[self._names[p]] for p in group["params"] if self._names.get(p) in tensors]
            traced_groups.append({"params": members, **options})
        for place, number in zip(self._places.inputs, given, strict=True):
            if id(place.owner) in held:  # a parameter without a gradient has no stand-in
                held[id(place.owner)][place.name] = number
        own = {key: value for key, value in vars(optimizer).items() if key not in _OURS}
        snapshots = [dict(group) for group in traced_groups]
        optimizer.param_groups = traced_groups
        optimizer._optimizer_step_post_hooks = OrderedDict()  # the host calls them after each step
        optimizer.state = defaultdict(dict, {tensors[name]: value for name, value in states.items() if value})
        try:
            yield optimizer.state
            self._check_unchanged(own, snapshots)
        finally:
            vars(optimizer).clear()
            vars(optimizer).update({**before, **replaced})

    def _check_unchanged(self, attributes: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
        optimizer = self.optimizer
        changed = [
            f"self.{key}"
            for key, value in vars(optimizer).items()
            if key not in _OURS and (key not in attributes or attributes[key] is not value)
        ]
        for index, (old, new) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            changed += [f"param_groups[{index}][{key!r}]" for key in new if key not in old or old[key] is not new[key]]
        if changed:
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__}.step changes {', '.join(changed)}, which a compiled step would do only once; "
                "keep such values in self.state[p], or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )

    # -- state in and out --------------------------------------------------------------------------------------------

    def import_state(self, params: Params) -> OptimizerState:
        state: OptimizerState = {}
        fresh: set[str] = set()
        trained = jax.eval_shape(self.init, dict(params)).keys()
        for name, param in self._members().items():
            if name in trained:
                saved = self.optimizer.state.get(param)
                if saved:
                    state[name] = self._imported(name, saved, params[name])
                else:
                    fresh.add(name)
        if fresh:
            born = make_state(lambda some: {name: one for name, one in self.init(some).items() if name in fresh}, params)
            state.update(born)
        return place_unread(state)

    def _imported(self, name: str, saved: dict[str, Any], param: jax.Array) -> State:
        """The arrays of a saved state dict of one parameter, placed as its state: numbers become real or int32 scalars."""
        self._layouts[name] = layout = layout_of(saved)
        arrays: State = {}
        for leaf, (path, kind) in zip(pytree.tree_leaves(saved), layout.leaves, strict=True):
            if is_array(kind):
                value = leaf if isinstance(leaf, torch.Tensor) else np.asarray(leaf, self._real if kind is float else np.int32)
                dtype = jax_dtype(value.dtype) if isinstance(value, torch.Tensor) else value.dtype
                arrays[path] = place_state(value, param, dtype)
        return arrays

    def write_state(self, opt_state: OptimizerState) -> None:
        host = scalars_on_host(opt_state)
        for param, name in self._names.items():  # not of the groups, which may have changed since
            arrays = host.get(name)
            if not arrays:
                continue
            layout = self._layouts[name]
            leaves = [exported_leaf(arrays[path], kind) if is_array(kind) else kind for path, kind in layout.leaves]
            self.optimizer.state[param] = pytree.tree_unflatten(leaves, layout.spec)

    def _members(self) -> dict[str, torch.Tensor]:
        """Name → parameter, for every parameter of every group.

        Raises:
            UnsupportedOptimizerError: a parameter that has no name.
        """
        found: dict[str, torch.Tensor] = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                found[name_of(self._names, param, index, position)] = param
        return found


def _meta(array: Any) -> torch.Tensor:
    """A tensor without values that is like ``array``."""
    return torch.empty(array.shape, dtype=torch_dtype(array.dtype), device="meta")


def _with_tensors(value: Any, given: Iterator[torch.Tensor]) -> Any:
    """An option with the given tensors in place of its numbers."""
    if isinstance(value, tuple | list):
        return type(value)(next(given) for _ in value)
    return next(given)


@contextlib.contextmanager
def as_if_compiled() -> Iterator[None]:
    """Make torch's optimizers behave as under ``torch.compile``: step counts are tensors, checks of devices are skipped.

    The profiler's marks around ``step()`` stay out of the graph.
    """
    hooks = dict(_global_optimizer_post_hooks)  # the host calls them after each step
    _global_optimizer_post_hooks.clear()
    patches = (
        (torch.compiler, "_is_compiling_flag", True),
        (torch.autograd.profiler, "record_function", lambda *_: contextlib.nullcontext()),
    )
    try:
        with patched(patches):
            yield
    finally:
        _global_optimizer_post_hooks.update(hooks)
