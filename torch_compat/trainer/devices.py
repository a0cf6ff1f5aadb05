"""The JAX devices of ``Trainer(accelerator, devices, num_nodes)``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import torch

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.environments.fixed_world import MissingVariableError
from torch_compat.utilities.exceptions import (
    ArgumentTypeError,
    ArgumentValueError,
    MisconfigurationException,
    SetupRuntimeError,
)
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.cluster import distributed
from xlatrain.cluster.distributed import cluster
from xlatrain.cluster.launch import ELASTIC
from xlatrain.host import libtpu_environment, malloc
from xlatrain.supported import how_to_install
from xlatrain.xla import compilation_cache

_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu", "auto": None}
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
_described: list[Sequence[Any]] = []


def check_platform(accelerator: str) -> str | None:
    """The JAX platform of ``Trainer(accelerator=…)``; None for ``"auto"``.

    Raises:
        ArgumentValueError: an accelerator that JAX does not drive, or the strategy of 1.x.
    """
    if accelerator.startswith(("ddp", "dp", "horovod", "tpu_spawn")):
        raise ArgumentValueError(f"accelerator={accelerator!r} of 1.x is a strategy since 1.5: use strategy='ddp'")
    if accelerator not in _PLATFORMS:
        raise ArgumentValueError(
            f"You selected an invalid accelerator name: `accelerator={accelerator!r}`. Available names are: "
            f"{', '.join(_PLATFORMS)}"
        )
    return _PLATFORMS[accelerator]


@contextlib.contextmanager
def described_devices(devices: Sequence[Any]) -> Iterator[None]:
    """Give every Trainer in the block these devices, whatever its flags say. Programs can be compiled for them, none can run."""
    _described.append(devices)
    try:
        yield
    finally:
        _described.pop()


def find_devices(
    platform: str | None,
    devices: int | str | Sequence[int],
    num_nodes: int,
    environment: ClusterEnvironment | None = None,
    *,
    owner: str = "Trainer",
) -> list[Any]:
    """The devices of a run, over all processes. Joins the world and starts JAX's backend, if that has not happened.

    Args:
        platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, or None for whatever JAX finds first.
        devices: a count or indices per process, or ``"auto"`` / -1 for all.
        num_nodes: expected number of processes, 1 where it was not given; checked if it is more.
        environment: says which world this process joins; None: what started it.
        owner: ``"Trainer"`` or ``"Fabric"``, to which the arguments were given.

    Raises:
        MisconfigurationException: fewer devices or processes than asked for, no such platform, or GPUs that only torch sees.
    """
    wanted = _parse(devices, platform, owner)
    if _described:
        return list(_described[-1])
    if not _backend_started():
        if platform is None:
            libtpu_environment.keep_quiet()
        if os.environ.get("XLATRAIN_EXECUTOR") == "eager":  # on a GPU its memory is torch's
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        if platform == "cpu":
            jax.config.update("jax_platforms", "cpu")
        if platform in (None, "cpu") and wanted is not None and (need := _needed(wanted)) > 1:
            _ask_for_cpu_devices(need)
    compilation_cache.enable()
    _join(environment, wanted, num_nodes, owner)
    malloc.keep_freed()
    found = _devices_of(platform)
    _check_not_overlooked(platform, found)
    processes = sorted({device.process_index for device in found})
    if num_nodes > 1 and num_nodes != len(processes) and str(num_nodes) != os.environ.get(ELASTIC):
        raise MisconfigurationException(
            f"{owner}(num_nodes={num_nodes}), but {len(processes)} process(es) joined. Start one process per host, e.g. "
            f"`xlatrain launch --processes {num_nodes} …`, torchrun or srun"
        )
    picked = [device for process in processes for device in _pick(wanted, [d for d in found if d.process_index == process])]
    _warn_of_other_number(wanted, picked)
    return picked


def _join(environment: ClusterEnvironment | None, devices: int | list[int] | None, num_nodes: int, owner: str) -> None:
    """Join the world that the cluster environment, or else the launcher of this process, describes."""
    if environment is None:
        distributed.initialize()
        return
    count = devices if isinstance(devices, int) else len(devices or ())
    environment.validate_settings(num_devices=count, num_nodes=num_nodes)
    if not environment.creates_processes_externally:
        if num_nodes > 1:
            raise MisconfigurationException(
                f"{owner}(num_nodes={num_nodes}): {type(environment).__name__} does not start the other processes; "
                "start one on each host (`xlatrain launch`, torchrun, srun), or use strategy='ddp_spawn' on one host"
            )
        distributed.initialize()
        return
    try:
        size = environment.world_size()
    except MissingVariableError:  # not started by that launcher: this process is alone, as with one device in stock
        size = 1
    if size > 1:
        place = _place_of_launcher()
        same = (place.process_count, place.process_id) == (size, environment.global_rank())
        address = f"{environment.main_address}:{environment.main_port}"
        if same and place.agent_store and address == place.coordinator_address:
            distributed.initialize()  # a torchrun agent listens there: its store says where process 0 does
            return
        distributed.initialize(
            address,
            size,
            environment.global_rank(),
            place.local_device_ids if same else None,  # where several processes share a host's GPUs
            local_process_id=environment.local_rank(),
        )


def _place_of_launcher() -> cluster.ProcessPlace:
    """The place that the launcher's variables give, where an environment of the user's own decides: it may make more of them."""
    try:
        return cluster.detect()
    except ValueError:
        return cluster.ALONE


def _parse(devices: object, platform: str | None, owner: str) -> int | list[int] | None:
    """A count, a list of indices, or None for all.

    Raises:
        MisconfigurationException: none of these; it is a TypeError where stock's is, a ValueError for no device at all.
    """
    if devices in ("auto", -1, "-1"):
        return None
    if devices in (0, "0", []) and not isinstance(devices, bool):
        raise ArgumentValueError(
            f"`{owner}(devices={devices!r})` value is not a valid input using {platform or 'auto'} accelerator: expected a "
            "positive number, a list of indices, 'auto' or -1"
        )
    kind = {"gpu": "CUDAAccelerator", "tpu": "TPUAccelerator"}.get(platform or "", "CPUAccelerator")
    expected = f"`devices` selected with `{kind}` should be an int > 0, a list of indices, 'auto' or -1; found {devices!r}"
    if isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
        raise ArgumentTypeError(expected)
    if isinstance(devices, int):
        return devices
    if isinstance(devices, str):
        parts = [part.strip() for part in devices.split(",") if part.strip()]
        if parts and all(part.isdigit() for part in parts):
            return int(parts[0]) if len(parts) == 1 and "," not in devices else [int(part) for part in parts]
    if isinstance(devices, Sequence) and not isinstance(devices, str) and devices:
        if len(set(devices)) != len(devices):
            raise ArgumentTypeError(f"{expected}, but an index stands there twice")
        return [int(index) for index in devices]
    raise ArgumentTypeError(expected)


def _backend_started() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def _ask_for_cpu_devices(count: int) -> None:
    """Have JAX make ``count`` CPU devices, unless the user's environment decides."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if int(getattr(jax.config, "jax_num_cpu_devices", -1)) < count:
        jax.config.update("jax_num_cpu_devices", count)


def _warn_of_other_number(wanted: int | list[int] | None, picked: list[Any]) -> None:
    """Warn that the Trainer has made more CPU devices than the launcher of this process wanted."""
    given = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    if wanted is None or picked[0].platform != "cpu" or not given.isdigit() or not 1 < int(given) < _needed(wanted):
        return
    rank_zero_warn(
        f"Trainer(devices={wanted!r}) has made {_needed(wanted)} CPU devices in each process, but this one was started for "
        f"{given} (`xlatrain launch --devices-per-process {given}`, or JAX_NUM_CPU_DEVICES={given}). The Trainer's counts: "
        "give both the same, or Trainer(devices='auto')"
    )


def _devices_of(platform: str | None) -> list[Any]:
    try:
        return jax.devices(platform) if platform else jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS names only what JAX does not have
        asked = os.environ.get("JAX_PLATFORMS", "")
        extra = _EXTRAS.get({"cuda": "gpu"}.get(asked, platform or asked), "")
        hint = f" Install JAX for it: {how_to_install(extra)}." if extra else ""
        why = f"JAX_PLATFORMS={asked} is set" if isinstance(error, AssertionError) else error
        what = "No supported gpu backend found! " if platform == "gpu" else ""
        raise SetupRuntimeError(f"{what}accelerator={platform or 'auto'!r}: JAX finds no such device ({why}).{hint}") from error


def _check_not_overlooked(platform: str | None, found: list[Any]) -> None:
    """Refuse a run on CPUs that was not asked for where only torch sees the GPUs: it would be slow and not say why."""
    asked = platform is not None or jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if not asked and found[0].platform == "cpu" and torch.cuda.is_available():
        raise MisconfigurationException(
            f"accelerator='auto': torch {torch.__version__} sees {torch.cuda.device_count()} GPU(s), JAX does not, and it would "
            f"run on the CPU. Install JAX for them: {how_to_install('cuda')}; or ask for the CPU: Trainer(accelerator='cpu'), "
            "JAX_PLATFORMS=cpu"
        )


def _needed(wanted: int | list[int]) -> int:
    """The number of devices that there must be, so that these can be picked."""
    return wanted if isinstance(wanted, int) else max(wanted) + 1


def _pick(wanted: int | list[int] | None, local: list[Any]) -> list[Any]:
    if wanted is None:
        return local
    need = _needed(wanted)
    if need > len(local):
        fix = (
            f"JAX was started before the Trainer was made; set JAX_NUM_CPU_DEVICES={need} (or "
            f"jax.config.update('jax_num_cpu_devices', {need}) before anything uses JAX)"
            if local and local[0].platform == "cpu"
            else f"set devices to at most {len(local)}, or 'auto'"
        )
        raise MisconfigurationException(f"devices={wanted!r}, but JAX has {len(local)} {local[0].platform} device(s) here; {fix}")
    return local[:wanted] if isinstance(wanted, int) else [local[index] for index in wanted]
