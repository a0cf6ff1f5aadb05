"""Lines of the user's code that write to tensors in place, for the error of a backward pass that needed what was there."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xlatrain.bridge.errors import user_line

_SHAPE = re.compile(r"Tensor \[([\d, ]*)\]")


def is_of_writes_in_place(error: Exception) -> bool:
    """Whether autograd missed a tensor that was written to."""
    return "modified by an inplace operation" in str(error)


class InPlaceLines(TorchDispatchMode):
    """Notes the lines that write in place while a step runs eagerly; only for a step that is known to fail."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[tuple[int, ...], str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            line = user_line(traceback.extract_stack())
            if line is not None:
                self._lines.append((tuple(args[0].shape), line))
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))

    def notes(self, error: Exception) -> list[str]:
        """The note about the line that wrote what an error of autograd misses: the last that wrote to a tensor of its shape."""
        found = _SHAPE.search(str(error))
        if not is_of_writes_in_place(error) or not self._lines:
            return []
        shape = tuple(int(size) for size in found[1].split(",") if size.strip()) if found else None
        lines = [line for of, line in self._lines if of == shape] or [line for _, line in self._lines]
        return [f"in {lines[-1]}"]
