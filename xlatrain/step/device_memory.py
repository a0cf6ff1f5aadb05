"""Out of device memory: what XLA says about it, in bytes, and what lies on the devices.

XLA raises ``jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED`` where a TPU's compiler finds that a program cannot fit, and where
an allocation fails. The latter may be noticed late: JAX runs programs asynchronously, so whoever reads a result gets the error.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xlatrain.step.offload import MEMORY as HOST_MEMORY
from xlatrain.step.state import TrainState

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZES = (
    r"Used (?P<wanted>[\d.]+)(?P<unit>[KMGT]?) of (?P<there>[\d.]+)(?P<there_unit>[KMGT]?)",
    r"\((?P<wanted>[\d.]+)(?P<unit>[KMGT]?)i?B?\) exceeds available HBM \((?P<there>[\d.]+)(?P<there_unit>[KMGT]?)",
    r"(?:allocating|to allocate) (?P<wanted>[\d.]+) ?(?P<unit>[KMGT]?)i?(?:B|bytes)",
)
_PARTS = {"params": "parameter", "buffers": "buffer", "opt_state": "optimizer state", "accumulated": "accumulated gradient"}


class OutOfDeviceMemory(RuntimeError):
    """A program needs more memory than a device has. The message holds XLA's own ``RESOURCE_EXHAUSTED``."""


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory message of XLA, parsed.

    Attributes:
        words: the first line of its message.
        wanted: bytes on a device, of the whole program or of the one allocation that failed; 0 where it does not say.
        available: bytes that there are; None where it does not say.
        compiling: whether the compiler found out.
    """

    words: str
    wanted: int
    available: int | None
    compiling: bool

    @classmethod
    def from_error(cls, error: BaseException) -> Shortage | None:
        """The shortage that an error tells of; None for an error of another kind."""
        message = str(error)
        if not any(words in message for words in ("RESOURCE_EXHAUSTED", "Ran out of memory", "Out of memory")):
            return None
        found = next((match for pattern in _SIZES if (match := re.search(pattern, message))), None)
        if found is None:
            return cls(message.strip().splitlines()[0], 0, None, compiling=False)
        sizes = found.groupdict()
        there = None if sizes.get("there") is None else _bytes(sizes["there"], sizes["there_unit"])
        return cls(message.strip().splitlines()[0], _bytes(sizes["wanted"], sizes["unit"]), there, there is not None)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


@dataclass(frozen=True)
class Held:
    """An array on the mesh; ``bytes`` are those of a device that has part of it."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    whole: bool

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}{', whole on each device' if self.whole else ''}"


def held(state: TrainState) -> list[Held]:
    """The arrays of a training state that take device memory, the largest first."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    found = [_held(path, leaf) for path, leaf in leaves if getattr(leaf.sharding, "memory_kind", None) != HOST_MEMORY]
    return sorted(found, key=lambda one: -one.bytes)


def _held(path: tuple[Any, ...], leaf: Any) -> Held:
    part, *rest = (_key(key) for key in path)
    sharding = getattr(leaf, "sharding", None)
    shard = tuple(leaf.shape) if sharding is None else sharding.shard_shape(tuple(leaf.shape))
    several = sharding is not None and len(sharding.device_set) > 1
    size = math.prod(shard) * np.dtype(leaf.dtype).itemsize
    name = f"{_PARTS.get(part, part)} {'.'.join(rest)}".strip()
    return Held(name, tuple(leaf.shape), size, several and shard == tuple(leaf.shape))


def _key(key: Any) -> str:
    key = getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))
    paths = getattr(key, "paths", None)  # a stack: the paths of its parameters
    return str(key) if paths is None else f"{paths[0]} … {paths[-1]}"


def explained(shortage: Shortage, state: TrainState | None, advice: Iterable[str]) -> OutOfDeviceMemory:
    """The error, with bytes per device, the five largest contributors, and what to change.

    Args:
        state: what was on the devices; None: nothing yet.
        advice: changes that would help, each a line.
    """
    arrays = [] if state is None else held(state)
    when = "a program was compiled" if shortage.compiling else "a program ran"
    asked = f": it asked for {size(shortage.wanted)}" if shortage.wanted else ""
    limit = "" if shortage.available is None else f" of {size(shortage.available)}"
    lines = [f"out of device memory when {when}{asked}{limit} on a device.", f"  XLA: {shortage.words}"]
    total = sum(one.bytes for one in arrays)
    lines.append(f"  The training state takes {size(total)} of each device. The five largest contributors on a device:")
    contributors = [(one.bytes, str(one)) for one in arrays[:5]]
    if shortage.wanted:
        rest = max(shortage.wanted - total, 0) if shortage.compiling else shortage.wanted
        contributors.append((rest, "activations, gradients, gathered parameters and scratch of the program"))
    largest = sorted(contributors, key=lambda one: -one[0])[:5]
    lines += [f"    {size(count):>12}  {what}" for count, what in largest]
    changes: Sequence[str] = list(advice)
    if changes:
        lines += ["  What helps:", *(f"    - {line}" for line in changes)]
    return OutOfDeviceMemory("\n".join(lines))


@contextlib.contextmanager
def explained_shortage(state: Callable[[], TrainState | None], advice: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Explain a shortage of device memory that programs in the block, or a wait for their results, run into.

    Raises:
        OutOfDeviceMemory: where XLA raised ``RESOURCE_EXHAUSTED``; see :func:`explained` for the arguments.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        shortage = Shortage.from_error(error)
        if shortage is None:
            raise
        raise explained(shortage, state(), advice()) from error


def size(count: float) -> str:
    """Bytes as people read them; binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError
