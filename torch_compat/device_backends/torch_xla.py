"""torch-xla: lazy tensors, compiled and run when a step ends, over all devices by SPMD.

https://docs.pytorch.org/xla/release/r2.9/perf/spmd_basic.html; torch_xla is imported when a backend is made, never before.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_compat.device_backends.backend import DeviceBackend, host_array
from torch_compat.device_backends.batch_norm import unbiased_running_variance
from torch_compat.device_backends.requirements import require_torch_xla
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.cluster import distributed

_RUNTIMES = {"cpu": "CPU", "tpu": "TPU", "gpu": "CUDA"}


class TorchXLA(DeviceBackend):
    """The devices of torch-xla's PJRT runtime, which this starts.

    With several devices SPMD is switched on, for the rest of the process: a tensor is one global tensor, and XLA divides what is
    computed. With one device there is no SPMD.

    Args:
        strategy: who asks, for errors.
        platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or None for what ``PJRT_DEVICE`` or torch-xla says.
        devices: how many; None: all of this process.

    Raises:
        MisconfigurationException: torch_xla is missing or was built for another torch; the runtime has another platform or
            another number of devices.
    """

    name = "torch_xla"

    def __init__(self, strategy: str, platform: str | None, devices: int | None) -> None:
        require_torch_xla(strategy)
        _ask_for(strategy, platform, devices)
        self._xla = importlib.import_module("torch_xla")
        self._native = self._xla._XLAC
        self._runtime = importlib.import_module("torch_xla.runtime")
        self._spmd = importlib.import_module("torch_xla.distributed.spmd")
        self._metrics = importlib.import_module("torch_xla.debug.metrics")
        self._model = importlib.import_module("torch_xla.core.xla_model")
        kind = str(self._runtime.device_type())
        self.platform = {"CUDA": "gpu"}.get(kind, kind.lower())
        if platform is not None and platform != self.platform:
            raise MisconfigurationException(
                f"{strategy}: accelerator={platform!r}, but torch-xla runs on {kind}; set PJRT_DEVICE={_RUNTIMES[platform]} "
                "before the program starts"
            )
        self._check_count(strategy, devices)
        self._mesh: Any = None
        self._host_mesh: Mesh | None = None
        self._stand_ins: Sequence[Any] = ()

    def _check_count(self, strategy: str, devices: int | None) -> None:
        here, everywhere = self._runtime.addressable_runtime_device_count(), self._runtime.global_runtime_device_count()
        self.local_devices = here if devices is None else devices
        single = self.local_devices == 1 and (here == everywhere)
        if self.local_devices != here and not single:
            count = {"CPU": "CPU_NUM_DEVICES", "TPU": "TPU_VISIBLE_CHIPS"}.get(self._runtime.device_type(), "PJRT_DEVICE")
            raise MisconfigurationException(
                f"{strategy}: devices={devices}, but torch-xla has {here} here, and its SPMD takes all or one; use "
                f"devices='auto', or set {count} before the program starts"
            )
        self.is_spmd = everywhere > 1 and not single
        if self._runtime.is_spmd() and not self.is_spmd:
            raise MisconfigurationException(
                f"{strategy}: devices={devices}, but SPMD over {everywhere} devices was switched on in this process, which "
                "torch-xla cannot take back; start another process"
            )
        if self.is_spmd and not self._runtime.is_spmd():
            if self._native._xla_get_spmd_config_is_locked():  # torch-xla would go on, and crash
                raise MisconfigurationException(
                    f"{strategy}: there are tensors on {self.root_device} already, without SPMD over {everywhere} devices; make "
                    "this Trainer before them, in a process that has used no single device"
                )
            self._runtime.use_spmd()
        self.process_count = self._runtime.process_count() if self.is_spmd else 1
        self.process_index = self._runtime.process_index() if self.is_spmd else 0

    @property
    def root_device(self) -> torch.device:
        return self._xla.device()

    def local_positions(self) -> list[int]:
        if not self.is_spmd:
            return [0]
        everywhere = list(self._native._xla_get_all_runtime_devices())
        return [everywhere.index(device) for device in self._native._xla_get_runtime_devices()]

    def use_mesh(self, mesh: Mesh, stand_ins: Sequence[Any]) -> None:
        self._host_mesh, self._stand_ins = mesh, stand_ins
        if self.is_spmd:
            positions = np.array([stand_ins.index(device) for device in mesh.devices.flat])
            self._mesh = self._spmd.Mesh(positions, tuple(mesh.shape.values()), tuple(mesh.axis_names))

    @property
    def mesh(self) -> Any:
        """The ``torch_xla.distributed.spmd.Mesh``; None on one device."""
        return self._mesh

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._xla.step(), unbiased_running_variance():
            yield

    def compiled(self) -> int:
        data = self._metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    def put(self, tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
        moved = tensor.to(self.root_device)
        self.annotate(moved, spec)
        return moved

    def put_rows(self, tensor: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        if self.process_count == 1:
            return self.put(tensor, PartitionSpec(axes))
        return self._from_own_rows(tensor.detach().cpu(), axes)

    def _from_own_rows(self, rows: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
        """The global tensor made of this process's rows, which must be as many on every process.

        Raises:
            ValueError: they are not, or cannot be dealt evenly to the devices.
        """
        assert self._host_mesh is not None
        sizes = distributed.all_gather_object(rows.shape[0])
        parts = math.prod(self._host_mesh.shape[axis] for axis in axes)
        shape = (sum(sizes), *rows.shape[1:])
        if len(set(sizes)) > 1 or shape[0] % parts:
            raise ValueError(
                f"processes brought {sizes} rows of a batch, which must be the same number everywhere and a multiple of the "
                "devices on several hosts with torch-xla; use drop_last=True, and a batch size per host that its devices divide"
            )
        where = NamedSharding(self._host_mesh, PartitionSpec(axes)).devices_indices_map(shape)
        starts = [where[device][0].start or 0 for device in self._own_stand_ins()]
        each = shape[0] // parts
        shards = [rows[start - min(starts) :][:each].contiguous() for start in starts]
        return self._native._global_tensor_from_cpu_shards(shards, self._sharding(PartitionSpec(axes), rows.ndim), list(shape))

    def _own_stand_ins(self) -> list[Any]:
        return [self._stand_ins[position] for position in self.local_positions()]

    def put_array(self, array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
        if not self.is_spmd:
            return super().put_array(array, dtype)
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        parts = {shard.device: shard.data for shard in array.addressable_shards}
        made: dict[int, torch.Tensor] = {}  # replicas share a tensor
        shards = []
        for number, device in enumerate(self._own_stand_ins()):
            key = 0 if array.is_fully_replicated else number
            if key not in made:
                made[key] = from_numpy(np.array(parts[device])).to(dtype)
            shards.append(made[key])
        return self._native._global_tensor_from_cpu_shards(shards, self._sharding(sharding.spec, array.ndim), list(array.shape))

    def array_of(self, tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
        if not self.is_spmd:
            return super().array_of(tensor, sharding)
        tensor = tensor.detach()
        wanted = sharding.devices_indices_map(tuple(tensor.shape))
        mine = self._own_stand_ins()
        if not self._native._get_xla_sharding_spec(tensor):
            return super().array_of(tensor, sharding)
        found = self._native._get_local_shard_replica_and_indices([tensor])[0]
        if any(not _same(index, wanted[device], tensor.shape) for (_, index), device in zip(found, mine, strict=True)):
            return super().array_of(tensor, sharding)
        shards = [shard for shard, _ in self._native._get_local_shards([tensor])[0]]
        arrays = [jax.device_put(host_array(shard), device) for shard, device in zip(shards, mine, strict=True)]
        return jax.make_array_from_single_device_arrays(tuple(tensor.shape), sharding, arrays)

    def annotate(self, tensor: torch.Tensor, spec: PartitionSpec) -> None:
        if self.is_spmd and not self._native._get_xla_sharding_spec(tensor):
            self._native._xla_mark_sharding(tensor, self._sharding(spec, tensor.ndim))

    def _sharding(self, spec: PartitionSpec, ndim: int) -> Any:
        return self._mesh.get_op_sharding((*spec, *[None] * (ndim - len(spec))))

    def manual_seed(self, seed: int) -> None:
        self._model.set_rng_state(seed & 0x7FFFFFFFFFFFFFFF)

    def random_state(self) -> int:
        return int(self._model.get_rng_state())

    def set_random_state(self, state: Any) -> None:
        self._model.set_rng_state(int(state))


def _same(index: Any, wanted: tuple[slice, ...], shape: torch.Size) -> bool:
    """Whether two descriptions of a shard mean the same shard; ``...`` is the whole."""
    if index is Ellipsis:
        index = [slice(None)] * len(shape)
    pairs = zip(index, wanted, shape, strict=True)
    return all(one.indices(size) == other.indices(size) for one, other, size in pairs)


def _ask_for(strategy: str, platform: str | None, devices: int | None) -> None:
    """Say by environment what the runtime is to be, before it starts; what the user has set stays."""
    if platform is not None:
        os.environ.setdefault("PJRT_DEVICE", _RUNTIMES[platform])
    if devices is not None and devices > 1 and os.environ.get("PJRT_DEVICE") == "CPU":
        os.environ.setdefault("CPU_NUM_DEVICES", str(devices))
