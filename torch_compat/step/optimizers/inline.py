"""An optimizer whose Python runs in the step: it wraps another one, evaluates its closure, or keeps counts of its own.

``step()`` of SAM runs forward and backward twice; Lookahead counts, and steps the optimizer that it wraps. Such a step is no
function of parameters and gradients alone, as that of :class:`~torch_compat.step.optimizers.captured.CapturedOptimizer` is, so
that its Python is captured with the user's step. Tensors in ``optimizer.state[p]`` are inputs and outputs of the program, laid
out as the parameter; numbers in there stay on the host, and in the graph they are host values, as options are.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.guards.notes import NOTES
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.optimizers.captured import AS_TRACED, as_if_compiled
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer, Params
from torch_compat.step.optimizers.param_group import (
    TracedOptions,
    UnsupportedOptimizerError,
    hashable,
    name_of,
    refuse_differentiable,
)
from torch_compat.step.optimizers.state import exported, place_state, place_unread, scalars_on_host
from torch_compat.step.optimizers.state_layout import StateLayout, layout_of
from torch_compat.step.values.own_dict import OwnDict
from xlatrain.bridge.capture.stand_ins import stood_for
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched
from xlatrain.bridge.tensors.dtypes import jax_dtype, torch_dtype
from xlatrain.step.optimizers.rule import State

_NO_NUMBERS = np.zeros(0, np.float32)
StateKey = tuple[str, str]
"""A parameter's name, and the path in its state: the number of the optimizer that has it, and the keys."""
InlineKey = tuple[int, str, str]
"""The index of an optimizer of the run, and a :data:`StateKey`."""
Layouts = Mapping[tuple[int, str], StateLayout]
"""The layout of the state that an optimizer, by number, has of a parameter."""


@dataclass(frozen=True)
class InlineResult:
    """The states at the end of a captured step.

    Attributes:
        tensors: those that are outputs of the program.
        numbers: host values, or numbers.
        layouts: of all.
    """

    tensors: Mapping[StateKey, torch.Tensor] = field(default_factory=dict)
    numbers: Mapping[StateKey, Any] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=dict)


class InlineOptimizer(FunctionalOptimizer):
    """An optimizer whose update is part of a captured step.

    Of the group options the learning rate is an input of the program; any other number becomes one when it first changes.

    Attributes:
        numbers: of the states, which are on the host.

    Raises:
        UnsupportedOptimizerError: one of its parameters is not the module's, or it wants autograd through its step.
    """

    makes_state_in_step = True

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__(optimizer, names)
        self.holders = members_of(optimizer)
        self.numbers: dict[StateKey, int | float] = {}
        self._params = {name: param for param, name in names.items()}
        self._layouts: Layouts = {}
        self._structures: dict[Hashable, int] = {(): 0}
        self._structure = 0
        self._options = TracedOptions()
        self.is_input = self._options.is_input
        self._real: list[dict[str, Any]] | None = None  # the groups, while copies are in their place
        for index, group in enumerate(self.groups()):
            refuse_differentiable(group, index)
            for position, param in enumerate(group["params"]):
                name_of(names, param, index, position)

    def groups(self) -> list[dict[str, Any]]:
        """The param groups of all members, each once; also while copies are in their place."""
        return self.groups_now() if self._real is None else self._real

    def groups_now(self) -> list[dict[str, Any]]:
        """The same, or the copies that are in their place."""
        return list({id(group): group for member in self.holders for group in member.param_groups}.values())

    # -- as other optimizers -----------------------------------------------------------------------------------------

    def init(self, params: Params) -> dict[str, State]:
        return {}

    def host_state(self) -> list[dict[Any, Any]]:
        return [*self.groups(), self.numbers]

    def options(self) -> tuple[np.ndarray, Hashable]:
        groups = self.groups()
        self._options.read(groups)
        members = tuple(tuple(map(id, group["params"])) for group in groups)
        options = (self._options.fixed(), frozenset(self._options.inputs))
        return _NO_NUMBERS, (options, members, self._structure, tuple(self.shared().values()))

    def update(self, grads: Any, opt_state: Any, params: Params, hyper: Any) -> NoReturn:
        raise AssertionError("its update is part of a captured step")

    def import_state(self, params: Params) -> dict[str, State]:
        state: dict[str, State] = {}
        layouts: dict[tuple[int, str], StateLayout] = {}
        self.numbers = {}
        for number, member in enumerate(self.holders):
            for param, saved in member.state.items():
                name = self._name(param)
                if not saved:
                    continue
                layouts[number, name] = layout = layout_of(saved)
                for leaf, (path, kind) in zip(pytree.tree_leaves(saved), layout.leaves, strict=True):
                    if kind is torch.Tensor:
                        values = place_state(leaf, params[name], jax_dtype(leaf.dtype))
                        state.setdefault(name, {})[f"{number}.{path}"] = values
                    elif kind in (int, float):
                        self.numbers[name, f"{number}.{path}"] = leaf
        self.adopt(layouts)
        return place_unread(state)

    def write_state(self, opt_state: Mapping[str, State]) -> None:
        host = scalars_on_host(opt_state)
        for (number, name), layout in self._layouts.items():
            leaves = []
            for path, kind in layout.leaves:
                key = (name, f"{number}.{path}")
                array = kind is torch.Tensor
                leaves.append(exported(host[name][key[1]]) if array else self.numbers[key] if kind in (int, float) else kind)
            self.holders[number].state[self._params[name]] = pytree.tree_unflatten(leaves, layout.spec)

    # -- in a captured step ------------------------------------------------------------------------------------------

    def inputs(self, opt_state: Mapping[str, State]) -> dict[StateKey, torch.Tensor]:
        """Tensors without values that are like those of its state."""
        return {
            (name, path): torch.empty(array.shape, dtype=torch_dtype(array.dtype), device="meta")
            for name, arrays in opt_state.items()
            for path, array in arrays.items()
        }

    def shared(self) -> dict[StateKey, StateKey]:
        """For each number of the states the first that is the same at this path: counts of all parameters are one input."""
        first: dict[Hashable, StateKey] = {}
        return {key: first.setdefault((key[1], type(one), one), key) for key, one in self.numbers.items()}

    def adopt(self, layouts: Layouts) -> None:
        """A step has left states of these layouts."""
        if layouts is self._layouts:
            return
        self._layouts = layouts
        keys = {
            (name, f"{number}.{path}")
            for (number, name), one in layouts.items()
            for path, kind in one.leaves
            if kind in (int, float)
        }
        for key in self.numbers.keys() - keys:
            del self.numbers[key]
        text = tuple(
            (*where, str(one.spec), tuple((path, hashable(kind)) for path, kind in one.leaves)) for where, one in layouts.items()
        )
        self._structure = self._structures.setdefault(text, len(self._structures))

    @contextlib.contextmanager
    def traced(
        self,
        given: Mapping[StateKey, torch.Tensor],
        number_of: Callable[[StateKey], Any],
        stepped: Callable[[], None],
        hidden: Any = None,
    ) -> Iterator[Callable[[], InlineResult]]:
        """In the block all members have traced states, and copies of their groups; gives what collects the states.

        Args:
            given: the inputs.
            number_of: the host value in place of a number.
            stepped: called when the optimizer has stepped.
            hidden: takes the place of all states, in a step without inputs for them.
        """
        states: list[Any] = [TracedState() if hidden is None else hidden for _ in self.holders]
        for (number, name), layout in self._layouts.items() if hidden is None else ():
            leaves = []
            for path, kind in layout.leaves:
                key = (name, f"{number}.{path}")
                leaves.append(given[key] if kind is torch.Tensor else number_of(key) if kind in (int, float) else kind)
            states[number][self._params[name]] = OwnDict(pytree.tree_unflatten(leaves, layout.spec))
        real: dict[int, Any] = {
            id(one): states[number] for number, member in enumerate(self.holders) for one in _dicts_of(member.state)
        }
        groups = self.groups_now()
        copies = {id(group): OwnDict(group) for group in groups}
        for member in self.holders:
            real[id(member.param_groups)] = [copies[id(group)] for group in member.param_groups]
        kept = [(vars(member), dict(vars(member))) for member in self.holders]
        replaced: list[set[str]] = []
        for number, (member, (attributes, before)) in enumerate(zip(self.holders, kept, strict=True)):
            new: dict[str, Any] = {name: real[id(value)] for name, value in before.items() if id(value) in real}
            step = functools.partial(_step, member.step, stepped if number == 0 else _nothing)
            attributes.update({**new, "step": step, "_optimizer_step_post_hooks": OrderedDict()})
            replaced.append({*new, "step", "_optimizer_step_post_hooks"})
        self._real = groups
        try:
            yield functools.partial(self._collect, states)
        finally:
            self._real = None
            for names, (attributes, before) in zip(replaced, kept, strict=True):
                for name in names:
                    attributes.pop(name, None)
                attributes.update({name: before[name] for name in names if name in before})

    def _collect(self, states: Sequence[TracedState]) -> InlineResult:
        """
        Raises:
            CaptureError: the step keeps state under another key than a parameter, or has replaced ``optimizer.state``.
        """
        tensors: dict[StateKey, torch.Tensor] = {}
        numbers: dict[StateKey, Any] = {}
        layouts: dict[tuple[int, str], StateLayout] = {}
        for number, (member, states_of) in enumerate(zip(self.holders, states, strict=True)):
            if member.state is not states_of:
                raise CaptureError(f"{type(member).__name__}.step replaces self.state: change what is in it")
            for param, held in states_of.items():
                if not held:
                    continue
                if not isinstance(param, torch.Tensor) or not isinstance(held, dict):
                    raise CaptureError(
                        f"{type(member).__name__}.step keeps state under {param!r}, which is no parameter: keep it in "
                        "self.state[p], or in an option of the group"
                    )
                name = self._name(param)
                layout = layouts[number, name] = layout_of(held)
                leaves = []
                for leaf, (path, kind) in zip(pytree.tree_leaves(dict(held)), layout.leaves, strict=True):
                    key = (name, f"{number}.{path}")
                    if type(leaf) is HostScalar or kind in (int, float):
                        numbers[key] = leaf
                        kind = float if isinstance(leaf, float) else int
                    elif kind is torch.Tensor:
                        tensors[key] = leaf.detach()
                    leaves.append((path, kind))
                layouts[number, name] = StateLayout(layout.spec, tuple(leaves))
        return InlineResult(tensors, numbers, layouts)

    def _name(self, param: Any) -> str:
        if isinstance(param, torch.Tensor) and param in self._names:
            return self._names[param]
        raise UnsupportedOptimizerError(
            f"{type(self.optimizer).__name__} has state of something that is no parameter of the module: a compiled step has "
            "that of parameters, self.state[p]; run with the eager executor (XLATRAIN_EXECUTOR=eager)"
        )


class TracedState(MutableMapping[Any, Any]):
    """``optimizer.state`` while a step is captured: by parameter, whatever stands for it."""

    def __init__(self) -> None:
        self._held: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self._held.setdefault(_real(key), OwnDict())

    def __setitem__(self, key: Any, value: Any) -> None:
        self._held[_real(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._held[_real(key)]

    def __contains__(self, key: Any) -> bool:
        return _real(key) in self._held

    def get(self, key: Any, default: Any = None) -> Any:
        return self._held.get(_real(key), default)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """An optimizer, and those that it holds in attributes."""
    found = [optimizer]
    for one in found:
        held = [value for name, value in vars(one).items() if name not in ("state", "param_groups")]
        found += [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.optim.Optimizer) and leaf not in found]
    return tuple(found)


def traceable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that choose among implementations of torch's optimizers, as they have to be."""
    return {key: value for key, value in AS_TRACED.items() if key in options}


def _real(key: Any) -> Any:
    original = stood_for(key)
    return key if original is None else original


def _dicts_of(state: Any) -> Iterator[Any]:
    """A state, and the one that it stands for."""
    yield state
    if (own := getattr(state, "own", None)) is not None:
        yield own


def _nothing() -> None:
    """Do nothing after the step of an optimizer that is wrapped."""


def _step(step: Callable[..., Any], stepped: Callable[[], None], closure: Any = None, **kwargs: Any) -> Any:
    """``optimizer.step(closure)``, with torch's own optimizers as they are under ``torch.compile``; not so the closure."""
    given = () if closure is None else (functools.partial(_outside, closure),)
    with as_if_compiled():
        result = NOTES.call(step)(*given, **kwargs)  # what it reads and changes is followed, as of what a step calls itself
    stepped()
    return result


def _outside(closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with patched([(torch.compiler, "_is_compiling_flag", False)]):
        return closure(*args, **kwargs)
