"""A :class:`xlatrain.JaxModule` as a LightningModule: its variables are parameters and buffers, its steps ops of the graph.

The loop, strategies, callbacks and checkpoints see a LightningModule and know of no other kind.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from torch_compat.checkpoint.array_tensors import array_tensor
from torch_compat.core.module import LightningModule
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_arrays import host_value, is_here
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from xlatrain.bridge.jax_function import spec_of
from xlatrain.bridge.lazy_init import deferred_init
from xlatrain.bridge.nnx_module import NnxTensors, Returned
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.step.initial_value import InitialValue
from xlatrain.step.jax_module import CounterWanted, JaxModule, attach, host_of
from xlatrain.step.jax_step import REFUSED, STEPS, accepted, has, trace_step, where
from xlatrain.step.traced_init import trace_init

_STAGES = ("train", "validation", "test", "predict")
_HOOKS = (
    *("prepare_data", "setup", "teardown", "configure_callbacks", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_fit_start", "on_fit_end", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *(f"on_{stage}{part}_{end}" for stage in _STAGES for part in ("", "_epoch", "_batch") for end in ("start", "end")),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
)


class JaxHost(LightningModule, NnxTensors):
    """The LightningModule of one :class:`xlatrain.JaxModule`, which ``jax_module`` is.

    Callbacks get it as ``pl_module``. Its parameters are named as the variables are, by dotted path.

    Args:
        module: the module; it gets the present values of its variables in its hooks, and when a run is over.

    Raises:
        MisconfigurationException: it overrides what only torch modules have.
    """

    def __init__(self, module: JaxModule) -> None:
        super().__init__()
        _refuse(module)
        self._is_held = False
        if not _overrides(module, "configure_model"):
            self._take(module)
        else:
            _UNBUILT[self] = module
        attach(module, self)

    def _take(self, module: JaxModule, initial: Mapping[str, InitialValue] | None = None) -> None:
        self.hold(module, module.trainable, initial)
        self._is_held = True
        _COUNTERS[self] = {}

    def tensor_for(self, array: Any) -> torch.Tensor:
        """A tensor with an array's values; those that a run left split over a mesh stay there."""
        if not isinstance(array, jax.Array) or array.is_fully_replicated:
            return super().tensor_for(array)
        lazy = array_tensor(array, torch_dtype(array.dtype))
        with deferred_init(seed=0):
            return torch.empty(lazy.shape, dtype=lazy.dtype).copy_(lazy)

    @property
    def jax_module(self) -> Any:
        """The module, with the present values of its variables."""
        return self.sync() if self._is_held else _UNBUILT[self]

    @property
    def _user(self) -> Any:
        return self.variables.module if self._is_held else _UNBUILT[self]

    def take_values(self) -> None:
        """Take over what was written into the module's variables outside of a run."""
        if self._is_held:
            _ = self.version
            self._take_over(self.written())

    def sync_whole(self) -> None:
        """Give the module's variables the values of the run, where they are here."""
        if self._is_held:
            self.sync()

    # -- what the loop calls ---------------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Arrays of the batch become tensors, which the loop places and counts."""
        if _overrides(self._user, "on_before_batch_transfer"):
            batch = self._hook("on_before_batch_transfer", batch, dataloader_idx)
        return jax.tree.map(lambda leaf: from_numpy(np.asarray(leaf)) if _is_array(leaf) else leaf, batch)

    def configure_optimizers(self) -> Any:
        """The module's optax transformation.

        Raises:
            MisconfigurationException: something else, or nothing to train.
        """
        user = self._user
        found = user.configure_optimizers()
        place = where(user, "configure_optimizers")
        if isinstance(found, Mapping) and set(found) == {"optimizer"}:
            found = found["optimizer"]
        if isinstance(found, optax.MultiSteps):
            found = found.gradient_transformation()
        if found is None:
            rank_zero_warn(f"{place} returned None: this fit changes no weights")
            return None
        if not isinstance(found, optax.GradientTransformation):
            kinds = [type(one).__name__ for one in found] if isinstance(found, Sequence) else type(found).__name__
            raise MisconfigurationException(
                f"{place} returned {kinds}; expected one optax transformation, with its schedules in it. Several optimizers are "
                "optax.multi_transform, by parameter; optimizers that take turns (a GAN) need a LightningModule with the nnx "
                "modules in torch_compat.jax_module(…), or xlatrain.step.engine"
            )
        if not any(True for _ in self.parameters()):
            raise MisconfigurationException(
                f"{place} returned an optimizer, but {type(user).__name__} has no variables that match "
                f"trainable={type(user).trainable!r}, so there is nothing to train: make them nnx.Param in __init__"
            )
        return found

    def _run_step(self, name: str, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> Any:
        """A step of the module, as part of the graph."""
        leaves, structure = jax.tree.flatten(batch)
        if others := sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)}):
            raise MisconfigurationException(
                f"{type(self._user).__name__}.{name}: the batch has leaves of type {', '.join(others)}; expected a pytree "
                "of arrays (dicts, lists, tuples of tensors, numpy or JAX arrays). Leave the others out in collate_fn"
            )
        wanted = _COUNTERS[self].setdefault(name, ["batch_idx"] if accepted(type(self._user), name) > 1 else [])
        specs = list(map(spec_of, leaves))
        while True:
            key = (name, structure, tuple(wanted), dataloader_idx)
            function = functools.partial(_traced_step, name, structure, len(leaves), tuple(wanted), dataloader_idx)
            try:
                self.prepare(key, function, [*specs, *[_COUNTER] * len(wanted)])
                break
            except CounterWanted as counter:
                wanted.append(str(counter))
        values = {"batch_idx": batch_idx, "global_step": self.global_step, "current_epoch": self.current_epoch}
        counters = [torch.zeros((), dtype=torch.int32) + values[one] for one in wanted]
        found = self.call(key, function, [*leaves, *counters])
        logged, shape, training = found.note
        tensors = iter(found.auxiliary)
        for key, value, options in logged:
            self.log(key, next(tensors) if value is _ARRAY else value, **options)
        if not training:
            return jax.tree.unflatten(shape, list(tensors))
        rest = jax.tree.unflatten(shape, list(tensors))
        return {**rest, "loss": found.results[0]} if rest else found.results[0]

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Make the module's variables, once."""
        if self._is_held:
            return
        module = _UNBUILT.get(self)
        if module is not None:
            self._take(module, self._made(module))

    def _made(self, module: Any) -> dict[str, InitialValue] | None:
        """Call the user's ``configure_model``; the values of the variables, where they can be made later, on their shards."""

        def build(copy: Any) -> None:
            attach(copy, self)
            copy.configure_model()

        try:
            traced = trace_init(module, build, module.trainable)
        except Exception as error:
            # Whatever it is, a mistake of the user's comes up again below, in code that runs as it is written.
            module.configure_model()
            rank_zero_info(
                f"{where(module, 'configure_model')} cannot be traced, so the parameters are made on the host of each process: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
            return None
        vars(module).clear()
        vars(module).update(vars(traced.module))
        return traced.values

    def _hook(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module's hook: it sees the present values, and what it writes into variables counts."""
        with self._present_values():
            return getattr(self._user, name)(*args, **kwargs)

    @contextlib.contextmanager
    def _present_values(self) -> Iterator[None]:
        if not self._is_held:
            yield
            return
        self.sync()
        yield
        _ = self.version  # a hook may have changed plain attributes
        self._take_over(self.written())

    def _take_over(self, written: Mapping[str, Any]) -> None:
        """Give tensors the values that were written into variables."""
        for name, array in written.items():
            tensor = self.tensor(name)
            if tuple(tensor.shape) != array.shape:
                raise ValueError(f"{name!r} was given the shape {array.shape}; it had {tuple(tensor.shape)}")
            if isinstance(array, jax.Array) and not is_here(array):
                raise ValueError(
                    f"{name!r} was given an array that lies on several processes; expected one whose values this process has: "
                    "write it before the run, or make the change in the step"
                )
            with torch.no_grad():
                tensor.copy_(from_numpy(np.array(array if not isinstance(array, jax.Array) else host_value(array, repr(name)))))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self._user),), self.__getstate__()  # by the user's class: its own is made, and has no name

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_held:
            return {**super().__getstate__(), _MODULE: self._user}
        return {**NnxTensors.__getstate__(self), **super().__getstate__()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if (module := state.pop(_MODULE, None)) is None:
            super().__setstate__(state)
            _COUNTERS[self] = {}
        else:
            torch.nn.Module.__setstate__(self, state)
            _UNBUILT[self] = module
        attach(self._user, self)


def _blank(kind: type[JaxModule]) -> JaxHost:
    """A host of such a module, before it gets its state."""
    made = _class_for(kind)
    return made.__new__(made)


_MODULE = "the module without variables"
_ARRAY = "an array"
_COUNTER = jax.ShapeDtypeStruct((), jnp.int32)
_UNBUILT: weakref.WeakKeyDictionary[JaxHost, JaxModule] = weakref.WeakKeyDictionary()
_COUNTERS: weakref.WeakKeyDictionary[JaxHost, dict[str, list[str]]] = weakref.WeakKeyDictionary()


def hosted(module: JaxModule) -> JaxHost:
    """The LightningModule of a JaxModule, the same in all its runs as long as somebody keeps it."""
    host = host_of(module)
    if host is None:
        host = _class_for(type(module))(module)
    else:
        host.take_values()
    return host


@functools.cache
def _class_for(kind: type[JaxModule]) -> type[JaxHost]:
    """The class of hosts of such modules: it overrides what ``kind`` does, since the loop looks at what is overridden."""
    members: dict[str, Any] = {}
    for name in STEPS:
        if has(kind, name):
            members[name] = _step_method(name, min(accepted(kind, name), 3))
    for name in _HOOKS:
        if has(kind, name) and name != "on_before_batch_transfer":
            members[name] = _hook_method(name)
    if has(kind, "__call__"):
        members["forward"] = lambda self, *args, **kwargs: NnxTensors.forward(self, *args, **kwargs)
    for name in members:
        members[name].__qualname__ = f"{kind.__qualname__}.{name}"
        members[name].__name__ = name
    return type(kind.__name__, (JaxHost,), {**members, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _step_method(name: str, count: int) -> Any:
    """A step that takes as many arguments as the user's."""
    if count == 1:
        return lambda self, batch: self._run_step(name, batch, 0)
    if count == 2:
        return lambda self, batch, batch_idx: self._run_step(name, batch, batch_idx)
    return lambda self, batch, batch_idx, dataloader_idx=0: self._run_step(name, batch, batch_idx, dataloader_idx)


def _hook_method(name: str) -> Any:
    return lambda self, *args, **kwargs: self._hook(name, *args, **kwargs)


def _traced_step(
    name: str,
    structure: Any,
    size: int,
    wanted: tuple[str, ...],
    dataloader_idx: int,
    module: Any,
    arrays: Sequence[Any],
) -> Returned:
    """A step of ``module`` while JAX traces it."""
    counters = dict(zip(wanted, arrays[size:], strict=True))
    loss, output, traced = trace_step(module, name, jax.tree.unflatten(structure, arrays[:size]), counters, dataloader_idx)
    logged, values = [], []
    for key, value, options in traced:
        is_array = isinstance(value, jax.Array)
        logged.append((key, _ARRAY if is_array else value, options))
        values += [value] if is_array else []
    training = name == "training_step"
    leaves, shape = jax.tree.flatten(output)
    return Returned([loss] if training else [], [*values, *map(jnp.asarray, leaves)], (logged, shape, training))


def _refuse(module: JaxModule) -> None:
    """Raises:
    MisconfigurationException: the module overrides what only torch modules have.
    """
    kind = type(module)
    for reason, names in REFUSED.items():
        for name in names:
            if hasattr(kind, name):
                raise MisconfigurationException(f"{where(module, name)}: a JaxModule has no such method, it is {reason}")
    if not getattr(module, "automatic_optimization", True):
        raise MisconfigurationException(
            f"{kind.__name__}.automatic_optimization is False: a JaxModule has one optax transformation for all parameters, and "
            "no manual optimization. Use a LightningModule with torch_compat.jax_module(…), or xlatrain.step.engine"
        )
    if not has(kind, "training_step") and not any(has(kind, name) for name in STEPS):
        raise MisconfigurationException(f"{kind.__name__} has none of the steps {', '.join(STEPS)}")


def _overrides(module: Any, name: str) -> bool:
    return has(type(module), name)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array)) and leaf.dtype.kind not in "OUSMm"
