"""TorchScript beside functions that stand in for torch's while a step is captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xlatrain.bridge.patches import patched


def scripting_with(originals: list[tuple[Any, str, Any]]) -> Callable[..., Any]:
    """``torch.jit.script`` with ``(owner, name, value)`` in their places: it reads the source of what a function calls.

    torch scripts functions of its own when the first forward-mode derivative is taken (``torch.func.jvp``, ``hessian``), and
    packages do where a step imports them.
    """
    script = torch.jit.script

    @functools.wraps(script)
    def call(*args: Any, **kwargs: Any) -> Any:
        with patched(originals):
            return script(*args, **kwargs)

    return call
