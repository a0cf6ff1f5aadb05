"""The window of a convolution: a kernel's size and its way over an image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """The kernel's size and its way over an image, one number for each spatial dim."""

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    def positions(self, image: Sequence[int]) -> Sizes:
        """The number of positions along each dim of an image of so many pixels."""
        sizes = zip(image, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    def is_patches(self) -> bool:
        """Whether positions lie side by side, so that each pixel is in one column at most."""
        return self.kernel == self.stride and not any(self.padding) and set(self.dilation) == {1}

    def reached(self, image: Sequence[int], out: Sequence[int]) -> list[range]:
        """The taps of each dim, from the first to the last that see a pixel at some position; one at least."""
        sizes = zip(image, out, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [_reached(*dim) for dim in sizes]

    def taps(self, image: Sequence[int], out: Sequence[int]) -> list[tuple[Sizes, Sizes]]:
        """Each tap that is reached: its index among these, and where in the padded image its first position lies."""
        reached = self.reached(image, out)
        return [
            (
                tuple(at - taps.start for at, taps in zip(tap, reached, strict=True)),
                tuple(at * d for at, d in zip(tap, self.dilation, strict=True)),
            )
            for tap in itertools.product(*reached)
        ]

    def seen(self, starts: Sizes, out: Sequence[int]) -> tuple[slice, ...]:
        """Slices of the spatial dims of the padded image: what a tap sees at all positions."""
        sizes = zip(starts, out, self.stride, strict=True)
        return tuple(slice(start, start + (n - 1) * step + 1, step) for start, n, step in sizes)

    def back(self, starts: Sizes, image: Sequence[int], out: Sequence[int]) -> list[tuple[int, int, int]]:
        """The padding for ``lax.pad`` that puts what a tap sees at all positions back to its place in the image."""
        sizes = zip(starts, self.padding, image, out, self.stride, strict=True)
        return [(start - p, n - (start - p) - ((m - 1) * s + 1), s - 1) for start, p, n, m, s in sizes]


def _reached(image: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> range:
    seeing = [
        tap for tap in range(kernel) if any(0 <= position * stride + tap * dilation - padding < image for position in range(out))
    ]
    return range(seeing[0], seeing[-1] + 1) if seeing else range(1)
