"""TPU chips: memory, bandwidths, and in which shapes they are offered.

Sources: memory and shapes from the pages of each generation at https://cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x), the
memory that a program may use from libtpu 0.0.42's own out-of-memory errors, bandwidths from the table of chips in
https://jax-ml.github.io/scaling-book/tpus. Peak FLOP/s are those of :mod:`xlatrain.xla.peak_flops`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chip:
    """A generation of TPUs.

    Attributes:
        name: as in topology names.
        devices: JAX devices of one chip.
        hbm: bytes of memory of one chip that a program may use (less than the data sheet's: the runtime keeps some).
        hbm_bandwidth: bytes/s of one chip.
        ici_bandwidth: bytes/s of one link between chips, one way.
        dcn_bandwidth: bytes/s of one chip's share of its host's network, one way.
        dims: of the torus, 2 or 3.
        max_chips: of one slice.
        small: shapes below those that follow from a rule (:meth:`shapes`).
        clock: of its cores, in Hz; None where it is not told.
        options: what libtpu wants to be told.
    """

    name: str
    devices: int
    hbm: int
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float
    dims: int
    max_chips: int
    small: tuple[tuple[int, ...], ...]
    clock: float | None
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """Every shape of one slice: the small ones; on a 3-d torus also every ascending multiple of 4×4×4."""
        yield from self.small
        if self.dims == 2:
            return
        limit = self.max_chips // 16 // 4 + 1
        for a in range(4, limit * 4, 4):
            for b in range(a, limit * 4, 4):
                if a * b * b > self.max_chips:
                    break
                for c in range(b, self.max_chips // (a * b) + 1, 4):
                    yield (a, b, c)

    def host_bounds(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """The bounds of one host's chips. Up to 8 chips of a 2-d torus are one host, larger slices have hosts of 4."""
        if self.dims == 2 and math.prod(shape) <= 8:
            return (*shape, 1)  # pyright: ignore[reportReturnType]
        return (2, 2, 1)


_GIB = 1 << 30
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_DEEP = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

CHIPS = {
    chip.name: chip
    for chip in (
        # On v4 JAX sees the two cores of a chip as one device only if libtpu is told so, as it is on the machines themselves.
        Chip("v4", 1, int(30.75 * _GIB), 1.2e12, 45e9, 3.1e9, 3, 4096, _DEEP, 1.05e9, {"chip_config_name": "megacore"}),
        Chip("v5e", 1, int(15.75 * _GIB), 0.81e12, 45e9, 3.1e9, 2, 256, _FLAT, 1.5e9),
        Chip("v5p", 1, int(95.74 * _GIB), 2.8e12, 90e9, 6.25e9, 3, 6144, _DEEP, 1.75e9),
        Chip("v6e", 1, int(31.25 * _GIB), 1.6e12, 90e9, 12.5e9, 2, 256, _FLAT, None),
        Chip("tpu7x", 2, int(189.5 * _GIB), 7.4e12, 90e9, 12.5e9, 3, 9216, _DEEP, None),
    )
}
