"""A ``torch.optim`` optimizer whose class has an update rule in :mod:`xlatrain.step.optimizers`."""

from __future__ import annotations

import inspect
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_compat.step.optimizers.frozen_update import FrozenGroup, FrozenInit, FrozenUpdate, Gradients, OptimizerState, Params
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer, real_dtype
from torch_compat.step.optimizers.param_group import GroupReader
from torch_compat.step.optimizers.state import exported, make_state, place_state, place_unread, scalars_on_host
from xlatrain.step.optimizers import RULES
from xlatrain.step.optimizers.rule import State, UpdateRule


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer that is exactly one of ``torch.optim``'s classes with an update rule, its ``step`` its own."""
    kind = type(optimizer)
    if kind.__name__ not in RULES or getattr(torch.optim, kind.__name__, None) is not kind:
        return False
    if not inspect.unwrap(kind.step).__module__.startswith("torch.optim."):  # replaced: torch.optim.SGD.step = mine
        return False
    own_step = vars(optimizer).get("step")  # a scheduler wraps the class's step for the instance
    return own_step is None or (hasattr(own_step, "_wrapped_by_lr_sched") and own_step.__wrapped__ is kind.step)


class TableOptimizer(FunctionalOptimizer):
    """An optimizer by update rules."""

    by_parameter = True

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__(optimizer, names)
        self._kind = RULES[type(optimizer).__name__]
        self._readers: list[GroupReader] = []
        self._vector = np.zeros(0, np.float32)
        self._key: Hashable = ()
        self._read()

    def init(self, params: Params) -> OptimizerState:
        return self.frozen_init()(params)

    def frozen_init(self) -> FrozenInit:
        self._read()
        return self._initial({name for reader in self._readers for param, name in reader.members() if param.requires_grad})

    def hyper(self) -> np.ndarray:  # of each optimizer step of a manual one, whose key has looked at the members
        groups = self.optimizer.param_groups
        if len(groups) != len(self._readers):
            self._read()
        changed = [reader.refresh(group) for reader, group in zip(self._readers, groups, strict=True)]
        if any(changed):
            self._pack()
        return self._vector

    def options(self) -> tuple[np.ndarray, Hashable]:
        self._read()
        return self._vector, self._key

    def update(
        self, grads: Gradients, opt_state: OptimizerState, params: Params, hyper: jax.Array
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        return self.frozen().update(grads, opt_state, params, hyper)

    def frozen(self) -> FrozenUpdate:
        self._read()
        return FrozenUpdate(self._groups())

    def _groups(self) -> tuple[FrozenGroup, ...]:
        return tuple(
            FrozenGroup(reader.rule, reader.names, len(reader.numbers), reader.rule.initial(group))
            for reader, group in zip(self._readers, self.optimizer.param_groups, strict=True)
        )

    def stackable(self, paths: Iterable[str], opt_state: OptimizerState) -> bool:  # of one group, and with state all or none
        self._read()
        paths = set(paths)
        groups = [reader for reader in self._readers if not paths.isdisjoint(reader.names)]
        have = {path in opt_state for path in paths}
        return len(have) == 1 and (not groups or (len(groups) == 1 and paths <= set(groups[0].names)))

    def import_state(self, params: Params) -> OptimizerState:
        self._read()
        state: OptimizerState = {}
        fresh: set[str] = set()
        for reader, group in zip(self._readers, self.optimizer.param_groups, strict=True):
            for param, name in reader.members():
                saved = self.optimizer.state.get(param, {})
                if any(value is not None for value in saved.values()):  # SGD once saved {"momentum_buffer": None}
                    state[name] = self._imported(reader.rule, group, name, saved, params[name])
                elif param.requires_grad:
                    fresh.add(name)
        born = make_state(self._initial(fresh), {name: params[name] for name in fresh})
        return {**place_unread(state), **born}

    def _initial(self, wanted: Container[str]) -> FrozenInit:
        """The states of the parameters that are wanted."""
        groups = [replace(group, names=tuple(name for name in group.names if name in wanted)) for group in self._groups()]
        return FrozenInit(tuple(groups))

    def _imported(self, rule: UpdateRule, group: Any, name: str, saved: Mapping[str, Any], param: jax.Array) -> State:
        """The arrays for torch's state of one parameter, in the shapes and dtypes that the update rule uses.

        Raises:
            ValueError: an entry is missing, or has another shape.
        """
        template = jax.eval_shape(lambda p: rule.init(p, group), param)
        where = f"the state of optimizer {type(self.optimizer).__name__} for parameter {name!r}"
        state: State = {}
        for key, spec in template.items():
            value = 1.0 if key in rule.HIDDEN else saved.get(key)
            if value is None:
                raise ValueError(
                    f"{where} has no {key!r} (it has {sorted(saved)}), which its present options need ({rule}); load a "
                    "state_dict that was saved with the same options"
                )
            saved_value = value if isinstance(value, torch.Tensor) else np.asarray(value)
            if tuple(saved_value.shape) != spec.shape:
                raise ValueError(
                    f"{where}: {key!r} has shape {tuple(saved_value.shape)}, expected {spec.shape}; was the state_dict saved for "
                    "another model?"
                )
            state[key] = place_state(saved_value, param, spec.dtype)
        return state

    def write_state(self, opt_state: OptimizerState) -> None:
        host = scalars_on_host(opt_state)  # of the groups as the last step had them, which may have changed since
        for reader, group in zip(self._readers, self.optimizer.param_groups, strict=False):
            hidden = reader.rule.HIDDEN
            for param, name in reader.members():
                values = host.get(name)
                if values is None:  # frozen: what torch has for it stays
                    continue
                if not values or (not reader.rule.EAGER and values.get("step", 1) == 0):
                    self.optimizer.state.pop(param, None)
                    continue
                entry = self.optimizer.state[param]
                for key in _names_in_order(reader.rule, group, values, param.ndim):
                    if key not in hidden:
                        entry[key] = exported(values[key], None if key in reader.rule.SCALARS else param.dtype)

    def _read(self) -> None:
        """Bring readers, numbers and key up to date with the optimizer's param groups."""
        groups = self.optimizer.param_groups
        changed = len(groups) != len(self._readers)
        if changed:
            self._readers = [GroupReader(index, self._kind, self._names) for index in range(len(groups))]
        members_changed = False
        for reader, group in zip(self._readers, groups, strict=True):
            members_changed |= reader.refresh_members(group)
            changed |= reader.refresh(group)
        if changed:
            self._pack()
        elif members_changed:
            self._pack_key()

    def _pack(self) -> None:
        dtype = real_dtype(param for reader in self._readers for param in reader.params)
        # a new array each time: the caller may keep a device copy for as long as it is the same object
        self._vector = np.fromiter((value for reader in self._readers for value in reader.numbers), dtype)
        self._vector.flags.writeable = False
        self._pack_key()

    def _pack_key(self) -> None:
        self._key = _Key((type(self.optimizer).__name__, *((reader.rule, reader.names) for reader in self._readers)))


_orders: dict[tuple[UpdateRule, int], tuple[str, ...]] = {}


def _names_in_order(rule: UpdateRule, group: Any, values: Mapping[str, Any], ndim: int) -> tuple[str, ...]:
    """The names of a parameter's state in torch's order, which arrays that came through a program have lost."""
    found = _orders.get((rule, ndim))
    if found is None or set(found) != values.keys():
        made: list[str] = []
        jax.eval_shape(lambda param: made.extend(rule.init(param, group)), jax.ShapeDtypeStruct((1,) * ndim, jnp.float32))
        found = _orders[rule, ndim] = (*(name for name in made if name in values), *(values.keys() - set(made)))
    return found


class _Key:
    """A hashable key of an optimizer's rules and the names of maybe thousands of parameters, hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Hashable, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._hash == other._hash and self._parts == other._parts)

    def __repr__(self) -> str:
        return repr(self._parts)
