"""Device meshes: named axes over every device of every process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from xlatrain.host import libtpu_environment, malloc

_KINDS = {"cpu": "CPU device", "gpu": "GPU", "tpu": "TPU chip"}
AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Every axis that a mesh may have, outermost first. A mesh always has all the axes that it was asked for, in this order."""

STAGE_AXIS = "stage"
"""The axis over which repeated layers are split; outermost, since stages send each other least: it goes over slices first."""

EXPERT_AXIS = "expert"
"""The axis over which the experts of a mixture are split."""

DATA_AXES = (STAGE_AXIS, "data", "fsdp", EXPERT_AXIS)
"""The axes over which a batch is split; over stages outside of the layers that they are stages of."""

SEQUENCE_AXIS = "context"
"""The axis over which the sequences of a batch are split."""


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the given axis sizes, e.g. ``make_mesh({"data": 2, "fsdp": 4})``.

    One size may be -1: it takes the devices that the others leave. Axis types are ``Auto`` (GSPMD chooses the
    collectives). On TPUs JAX orders the devices by the torus.

    ::

        mesh = make_mesh({"data": 2, "fsdp": -1})  # fsdp: what is left

    Args:
        axes: axis name → size; names from :data:`AXES`.
        devices: the devices, default ``jax.devices()`` (all processes).

    Raises:
        ValueError: an unknown axis, or sizes whose product is not the number of devices.
    """
    unknown = set(axes) - set(AXES)
    if unknown:
        raise ValueError(f"unknown mesh axes {sorted(unknown)}; known axes: {', '.join(AXES)}")
    if devices is None:
        libtpu_environment.keep_quiet()
        malloc.keep_freed()
    all_devices = list(jax.devices() if devices is None else devices)
    names = [name for name in AXES if name in axes]
    sizes = _fill(names, [axes[name] for name in names], len(all_devices))
    types = (AxisType.Auto,) * len(names)
    if _slices(all_devices) > 1:
        return Mesh(_over_slices(sizes, names, all_devices), tuple(names), axis_types=types)
    if devices is None or _compiles_only(all_devices):
        # JAX orders them by the torus; jax.make_mesh would refuse an axis that is a part of a side, but for v5e.
        grid = mesh_utils.create_device_mesh(sizes, all_devices, allow_split_physical_axes=True)
        return Mesh(grid, tuple(names), axis_types=types)
    grid = np.asarray(all_devices, dtype=object).reshape(sizes)
    return Mesh(grid, tuple(names), axis_types=types)


def platform(mesh: Mesh) -> str:
    """The platform of the mesh's devices: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
    return mesh.devices.flat[0].platform


def in_words(mesh: Mesh) -> str:
    """A mesh in words: how many devices of which kind, and its axes that are larger than 1 ("8 CPU devices · fsdp 8")."""
    count, kind = mesh.devices.size, _KINDS.get(platform(mesh), f"{platform(mesh)} device")
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return f"{count} {kind}{'s' if count > 1 else ''}" + (f" · {axes}" if axes else "")


def _slices(devices: Sequence[Any]) -> int:
    """TPU slices that the devices belong to."""
    return len({device.slice_index for device in devices if device.platform == "tpu" and hasattr(device, "slice_index")})


def _compiles_only(devices: Sequence[Any]) -> bool:
    """Whether these are devices of a topology description: ordered as those of the machine itself will be."""
    return type(devices[0].client).__name__ == "CompileOnlyPyClient"


def _over_slices(sizes: Sequence[int], names: Sequence[str], devices: Sequence[Any]) -> np.ndarray:
    """Devices of several slices in mesh order: the outermost axes go over slices (the slow network), the others stay inside.

    Raises:
        ValueError: no outermost axes have a multiple of the slices.
    """
    left, between = _slices(devices), []
    for size in sizes:
        between.append(math.gcd(size, left))
        left //= between[-1]
    if left > 1:
        raise ValueError(
            f"mesh axes {dict(zip(names, sizes, strict=True))} cannot go over {_slices(devices)} slices: let the sizes of the "
            "outer axes be multiples of it, e.g. data = number of slices"
        )
    within = [size // part for size, part in zip(sizes, between, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, between, devices=devices, allow_split_physical_axes=True)


def _fill(names: Sequence[str], sizes: list[int], n_devices: int) -> list[int]:
    """Replace a single -1 by the number of devices that are left, and check the product."""
    asked = dict(zip(names, sizes, strict=True))
    if any(not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1 for size in sizes):
        raise ValueError(f"mesh axes {asked}: sizes must be positive whole numbers, or -1 for the remaining devices")
    if sizes.count(-1) > 1:
        raise ValueError(f"mesh axes {asked}: at most one size may be -1")
    known = math.prod(size for size in sizes if size != -1)
    sizes = [n_devices // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != n_devices:
        raise ValueError(
            f"mesh axes {asked} need {math.prod(sizes)} devices, but there are {n_devices}; change the sizes, "
            "or let one be -1 (the remaining devices)"
        )
    return sizes


def axes_over_slices(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which devices lie in several TPU slices, so that their collectives take the data-center network."""
    if _slices(mesh.devices.flatten().tolist()) < 2:
        return ()
    index = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    return tuple(name for dim, name in enumerate(mesh.axis_names) if (index != index.take([0], axis=dim)).any())


def data_parallel_size(mesh: Mesh) -> int:
    """The number of parts into which the mesh splits a batch; inside of a stage, that which its devices split."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh's axes over which dim 0 of a batch is split; inside of a stage those of its devices."""
    around = _around_in_a_stage()
    taken = () if around is None else around.manual_axes
    return tuple(axis for axis in DATA_AXES if axis in mesh.shape and axis not in taken)


def mesh_here(mesh: Mesh) -> Mesh | AbstractMesh:
    """``mesh`` as shardings and ``shard_map`` take it where this is called: inside of a stage the axes that are left of it."""
    around = _around_in_a_stage()
    return mesh if around is None else around


def shard_map_here(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``function`` on each device of a mesh; inside of a stage on each of the stage's."""
    here = mesh_here(mesh)
    left = {*mesh.axis_names} - {*getattr(here, "manual_axes", ())}
    return jax.shard_map(function, mesh=here, in_specs=in_specs, out_specs=out_specs, axis_names=left, check_vma=False)


def _around_in_a_stage() -> AbstractMesh | None:
    """The mesh around code inside of a stage; None elsewhere, also where another ``shard_map`` has axes by hand."""
    around = jax.sharding.get_abstract_mesh()
    return around if STAGE_AXIS in around.manual_axes else None


def stages(mesh: Mesh) -> int:
    """The number of stages into which the mesh splits repeated layers."""
    return dict(mesh.shape).get(STAGE_AXIS, 1)


def sequence_parts(mesh: Mesh) -> int:
    """The number of parts into which the mesh splits a sequence."""
    return dict(mesh.shape).get(SEQUENCE_AXIS, 1)


def is_multiprocess(mesh: Mesh) -> bool:
    """True when the mesh spans several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1
