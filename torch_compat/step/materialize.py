"""Materialization of a module's tensors on the mesh: from host memory, the tape, files, or the mesh of an earlier run."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torch_compat.checkpoint.array_tensors import array_behind, array_tensor
from torch_compat.checkpoint.checkpoint_dict import restore_arrays
from torch_compat.utilities.host_arrays import place
from xlatrain.bridge.lazy_init import born, describe_recorded, is_deferred, operand_of, undefer
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import borrowed
from xlatrain.bridge.tensors.lazy import unread_lazy
from xlatrain.bridge.tensors.live import disown, live_array
from xlatrain.cluster import distributed
from xlatrain.mesh.mesh import is_multiprocess
from xlatrain.mesh.sharding import ShardingRules

_SMALL = 1 << 20  # bytes of a tensor that goes to the device together with others: each call of JAX costs as much as they do
_IN_FLIGHT = 2  # programs dispatched ahead: each may hold its parameter's intermediate values


def place_tensors(
    tensors: Mapping[str, torch.Tensor],
    shardings: Mapping[str, Sharding | None],
    *,
    multiprocess: bool,
    take: Callable[[str, jax.Array], Any] = lambda name, array: array,
) -> dict[str, Any]:
    """The arrays of a module's tensors; one parameter after the other, so that one large one at most is ever whole on a host.

    Args:
        tensors: name → parameter or buffer.
        shardings: for each where it goes; None: the default device.
        multiprocess: whether the mesh spans processes. Host values are then process 0's.
        take: called with each array as it is made; gives what is kept in its place.

    Raises:
        RuntimeError: the processes recorded different computations.
        CheckpointMismatchError: see :func:`torch_compat.checkpoint.checkpoint_dict.restore_arrays`.
    """
    if multiprocess:
        _check_same_tape(tensors)
    kept: dict[str, Any] = {}
    unread: dict[str, torch.Tensor] = {}
    small: dict[str, np.ndarray] = {}
    in_flight: deque[jax.Array] = deque()
    for name, tensor in tensors.items():
        found = _values(tensor, shardings[name])
        if isinstance(found, jax.Array):
            kept[name] = take(name, found)
            in_flight.append(found)
            if len(in_flight) > _IN_FLIGHT:
                in_flight.popleft().block_until_ready()
        elif (array := array_behind(found.values)) is not None:
            kept[name] = take(name, jax.device_put(array, shardings[name]))
        elif unread_lazy(found.values) is not None:
            unread[name] = found.values
        elif shardings[name] is None and not multiprocess and tensor.nbytes <= _SMALL:
            small[name] = _copied(found.values, tensor.dtype)
        else:
            array = put(found.values, tensor.dtype, shardings[name], broadcast=multiprocess and not found.agreed)
            kept[name] = take(name, array)
    kept.update((name, take(name, array)) for name, array in jax.device_put(small).items())
    kept.update((name, take(name, array)) for name, array in _restored(unread, tensors, shardings).items())
    return {name: kept[name] for name in tensors}


def detach_sources(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Make tensors of the tape, and of an earlier run's mesh, ordinary again once they are placed, without host memory.

    Returns:
        The names of these tensors.
    """
    storageless = set()
    for name, tensor in tensors.items():
        was_live = disown(tensor)  # first: a live tensor is of no other class of ours
        if is_deferred(tensor):
            undefer(tensor)
            storageless.add(name)
        elif was_live:
            storageless.add(name)
    return storageless


def put_away(tensor: torch.Tensor, mesh: Mesh, rules: ShardingRules) -> torch.Tensor:
    """Take a host tensor's values to the mesh before its path is known, split by shape; gives a tensor that stands for them.

    Collective on several processes: the values are process 0's.
    """
    shape = tuple(tensor.shape)
    sharding = NamedSharding(mesh, ShardingRules(min_size=rules.min_size).spec("", shape, mesh))
    return array_tensor(put(tensor, tensor.dtype, sharding, broadcast=is_multiprocess(mesh)), tensor.dtype)


def put(tensor: torch.Tensor, dtype: torch.dtype, sharding: Sharding | None, *, broadcast: bool) -> jax.Array:
    """A host tensor on its shards, as ``dtype``, in its global shape.

    Args:
        sharding: None: on the default device, uncommitted.
        broadcast: every process takes process 0's values.
    """
    host = _copied(tensor, dtype)
    if broadcast:
        host = np.array(multihost_utils.broadcast_one_to_all(host), jax_dtype(dtype))
    return jax.device_put(host) if sharding is None else place(host, sharding)


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """A host tensor's values as ``dtype``, copied: JAX may keep the buffer, which torch goes on writing to."""
    return np.array(borrowed(tensor.detach().to(dtype)), jax_dtype(dtype))


def _values(tensor: torch.Tensor, sharding: Sharding | None) -> Any:
    """The array of a tensor on the mesh or on the tape, in its global shape; else host values, for the caller to place."""
    if (array := live_array(tensor)) is not None:
        return jax.device_put(array, sharding)
    if not is_deferred(tensor):
        return _HostValues(tensor)
    operand = operand_of(tensor)
    assert operand is not None
    made = born(operand, sharding)
    return made.values if isinstance(made.values, jax.Array) else made


class _HostValues:
    """The values of an ordinary tensor, which may differ between processes."""

    agreed = False

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def _restored(
    unread: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], shardings: Mapping[str, Sharding | None]
) -> dict[str, jax.Array]:
    """Lazy tensors (name → tensor), read directly onto shards in the dtypes of ``tensors``."""
    if not unread:
        return {}
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    templates = {
        ("state_dict", name): jax.ShapeDtypeStruct(
            tuple(tensors[name].shape), jax_dtype(tensors[name].dtype), sharding=shardings[name] or default
        )
        for name in unread
    }
    restored = restore_arrays({"state_dict": unread}, templates)
    return {name: restored["state_dict", name] for name in unread}


def _check_same_tape(tensors: Mapping[str, torch.Tensor]) -> None:
    """Programs are collective: every process must have recorded the same.

    Raises:
        RuntimeError: names the first tensor that differs.
    """
    mine = [(name, _digest(tensor)) for name, tensor in tensors.items()]
    everywhere = distributed.all_gather_object(_sha(repr(mine)))
    if len(set(everywhere)) == 1:
        return
    other = next(process for process, digest in enumerate(everywhere) if digest != everywhere[0])
    made = distributed.all_gather_object(mine)
    pairs = itertools.zip_longest(made[0], made[other])
    first = next((a or b)[0] for a, b in pairs if a != b)
    raise RuntimeError(
        f"process {other} made other parameters than process 0, first {first!r}: the constructor must do the same on every "
        "process (no branch on the rank; seed Python's and numpy's generators)"
    )


def _digest(tensor: torch.Tensor) -> str:
    recorded = describe_recorded(tensor) if is_deferred(tensor) else ""
    return _sha(f"{tuple(tensor.shape)} {tensor.dtype} {recorded}")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def check_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises:
    ValueError: a tensor that has no values yet, or that is not dense; names it.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is not initialised yet (a Lazy module): run one batch through the module, e.g. in "
                "setup() or "
                "configure_model(), before it is trained"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name!r} has layout {tensor.layout}; XLA trains dense (strided) parameters only")
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device, so it has no values: make the module without torch.device('meta'), or "
                "create it in "
                "configure_model()"
            )
        jax_dtype(tensor.dtype)
