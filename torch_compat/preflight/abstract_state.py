"""A module on a mesh without a single array: shapes, dtypes and shardings stand for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

from torch_compat.preflight.errors import PreflightError
from torch_compat.step.model_state import ModelState
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.live import disown
from xlatrain.mesh.sharding import like_parameters
from xlatrain.step.stacking import Stacking, stack_sharding
from xlatrain.step.state import TrainState
from xlatrain.step.step import state_shardings


class AbstractModelState(ModelState):
    """A :class:`ModelState` whose arrays are ``jax.ShapeDtypeStruct``. The module's own tensors stay as they are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tensors = {**self.params, **self.buffers}
        self.live._versions = dict.fromkeys(self._tensors, -1)  # so that a read asks for the values here, where it is refused

    def _take_over(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        return set()

    def _born(self, tensors: Mapping[str, torch.Tensor], shardings: Mapping[str, NamedSharding]) -> dict[str, Any]:
        return {
            name: abstract(tuple(tensor.shape), jax_dtype(tensor.dtype), self._sharding(shardings[name]))
            for name, tensor in tensors.items()
        }

    def _place(self, host: np.ndarray, sharding: jax.sharding.Sharding) -> Any:
        return abstract(host.shape, jax.dtypes.canonicalize_dtype(host.dtype), self._sharding(sharding))

    def _sharding(self, sharding: Any) -> Any:
        return None if self._unsharded else sharding

    def add_optimizer(self, init: Callable[[dict[str, jax.Array]], Any]) -> None:
        shapes = jax.eval_shape(init, self.state.params)
        shardings = like_parameters(shapes, self.state.params, self.state_places, self.mesh)
        opt_state = jax.tree.map(lambda leaf, at: abstract(leaf.shape, leaf.dtype, self._sharding(at)), shapes, shardings)
        self.state = replace(self.state, opt_state=opt_state)
        if not self._unsharded:
            self.shardings = state_shardings(self.state, self.param_shardings, shardings, self.mesh)

    def load_optimizer(self, load: Callable[[dict[str, jax.Array]], Any]) -> None:
        """Do nothing: the state that an optimizer brings from an earlier run has the shapes that it starts with."""

    def stacked_state(self, stacking: Stacking | None) -> TrainState:
        return self.state if stacking is None else _stacked(self.state, stacking)

    def accumulate(self, shapes: Mapping[str, Any]) -> None:
        """The state after a batch that only added up its gradients, which have these shapes."""
        accumulated = {
            name: abstract(leaf.shape, leaf.dtype, self._sharding(self._sharding_of(name))) for name, leaf in shapes.items()
        }
        self._state, self._stacking = replace(self._state, accumulated=accumulated), None

    def _sharding_of(self, name: Any) -> Any:
        paths = getattr(name, "paths", None)
        return self.param_shardings[name] if paths is None else stack_sharding(self.param_shardings[paths[0]], len(paths))

    def _read(self, name: str) -> np.ndarray:
        raise PreflightError(
            f"the values of {name!r} were read, but preflight has none: it compiles with shapes alone. Read them in a hook "
            "that preflight does not call (on_train_batch_end, on_train_epoch_end, …), or keep that part out of preflight"
        )

    def release(self, *, to_host: bool, failed: bool = False) -> list[str]:
        """Give the module's tensors their own class back; their values have not been touched."""
        for tensor in self._tensors.values():
            disown(tensor)
        self._tensors = {}
        return []


def abstract(shape: Sequence[int], dtype: Any, sharding: Any) -> Any:
    """An array without values."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _stacked(state: TrainState, stacking: Stacking) -> TrainState:
    def stack(values: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(values)
        for key in stacking.keys:
            if all(path in new for path in key.paths):
                parts = [new.pop(path) for path in key.paths]
                new[key] = jax.tree.map(functools.partial(_stack_of, len(parts)), parts[0])
        return new

    parts = {name: stack(getattr(state, name)) for name in ("params", "opt_state", "accumulated")}
    return replace(state, **parts)


def _stack_of(count: int, leaf: Any) -> Any:
    return abstract((count, *leaf.shape), leaf.dtype, stack_sharding(leaf.sharding, count))
