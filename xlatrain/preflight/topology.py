"""The pod that a program is compiled for, by name: ``v5e:16x16``, ``cpu:8``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from xlatrain.preflight import libtpu
from xlatrain.preflight.chips import CHIPS, Chip


class TopologyError(ValueError):
    """A topology that does not exist, or that nothing here can compile for."""


@dataclass(frozen=True)
class Topology:
    """A topology: the devices that a program is compiled for.

    Attributes:
        name: ``v5e:16x16``: generation and shape of one slice; ``cpu:8``: that many CPU devices of this process.
        num_slices: slices, joined by the data-center network.
        chip: the generation; None for CPUs.
        shape: chips of one slice along each dim of the torus.
    """

    name: str
    num_slices: int
    chip: Chip | None
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str, num_slices: int = 1) -> Topology:
        """A topology by its name.

        Args:
            name: ``"v5e:4x4"``, ``"v5p:2x2x2"``, ``"cpu:8"``, …
            num_slices: of the same shape.

        Raises:
            TopologyError: no such chip or shape; lists the near ones.
        """
        if num_slices < 1:
            raise TopologyError(f"num_slices={num_slices}: expected at least 1")
        kind, _, text = name.partition(":")
        kind = {"v5litepod": "v5e", "v5lite": "v5e", "v7x": "tpu7x", "7x": "tpu7x"}.get(kind, kind)
        if kind == "cpu":
            if not re.fullmatch("[1-9][0-9]*", text):
                raise TopologyError(f"topology {name!r}: expected cpu:N with N devices, e.g. cpu:8")
            if num_slices > 1:
                raise TopologyError(f"topology {name!r} with {num_slices} slices: CPUs have no slices; ask for one")
            return cls(name, 1, None, (int(text),))
        if kind in ("cuda", "gpu", "rocm"):
            raise TopologyError(
                f"topology {name!r}: JAX compiles for GPUs only where it finds one, so there is nothing to check in advance. "
                f"Choose cpu:N for the memory and collectives of the mesh, or one of {', '.join(CHIPS)}"
            )
        if kind not in CHIPS:
            near = difflib.get_close_matches(kind, CHIPS, n=3, cutoff=0.3) or list(CHIPS)
            raise TopologyError(f"topology {name!r}: no chip {kind!r}; near: {', '.join(near)}. Example: v5e:16x16")
        chip = CHIPS[kind]
        example = "x".join(map(str, chip.small[-1]))
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
            raise TopologyError(f"topology {name!r}: expected {kind}:SHAPE with {chip.dims} dims, e.g. {kind}:{example}")
        shape = tuple(map(int, text.split("x")))
        shapes = sorted(set(chip.shapes()), key=lambda one: (math.prod(one), one))
        if shape not in shapes:
            raise TopologyError(f"topology {name!r} is not offered; near: {', '.join(_near(kind, shape, shapes))}")
        return cls(f"{kind}:{text}", num_slices, chip, shape)

    @property
    def chips(self) -> int:
        """Chips of all slices; on CPUs devices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def platform(self) -> str:
        """The name of the platform, as ``jax.Device.platform`` gives it."""
        return "cpu" if self.chip is None else "tpu"

    @property
    def devices_per_chip(self) -> int:
        return 1 if self.chip is None else self.chip.devices

    @property
    def title(self) -> str:
        """The name with the number of slices."""
        return self.name if self.num_slices == 1 else f"{self.num_slices} × {self.name}"

    def devices(self) -> Sequence[Any]:
        """The JAX devices of this topology. Programs can be compiled for those of TPUs, but cannot run on them.

        Raises:
            LibtpuError: libtpu is missing, or of another version than this JAX wants.
            TopologyError: fewer CPU devices than wanted, because JAX has started already.
        """
        if self.chip is None:
            return _cpu_devices(self.shape[0])
        options = {**self.chip.options, "chips_per_host_bounds": self.chip.host_bounds(self.shape)}
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        devices = libtpu.describe(self.name, options)
        expected = self.chips * self.chip.devices
        if len(devices) != expected:
            raise TopologyError(f"libtpu gives {len(devices)} devices for {self.title}; expected {expected}")
        return devices


def _near(kind: str, shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """The shapes of about as many chips: the same ones in another order first."""
    chips = math.prod(shape) or 1
    ranked = sorted(shapes, key=lambda one: (sorted(one) != sorted(shape), abs(math.log(math.prod(one) / chips))))
    return [f"{kind}:{'x'.join(map(str, one))}" for one in ranked[:4]]


def _cpu_devices(count: int) -> list[Any]:
    if int(getattr(jax.config, "jax_num_cpu_devices", -1)) < count and not libtpu.backend_started():
        jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise TopologyError(
            f"topology cpu:{count}: JAX was started with {len(found)} CPU device(s); set JAX_NUM_CPU_DEVICES={count} before it "
            "starts"
        )
    return found[:count]
