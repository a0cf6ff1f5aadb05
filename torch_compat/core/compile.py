"""Modules inside ``torch.compile``'s wrapper (``lightning.pytorch.utilities.compile``)."""

from __future__ import annotations

from typing import Any

from torch_compat.core.module import LightningModule


def from_compiled(model: Any) -> LightningModule:
    """The LightningModule inside ``torch.compile(module)``; ``ValueError`` for anything else.

    XLA compiles the whole step, so what ``torch.compile`` would have done is left out.
    """
    from torch._dynamo import OptimizedModule

    if not isinstance(model, OptimizedModule):
        raise ValueError(f"`model` is required to be a `OptimizedModule`. Found a `{type(model).__name__}` instead.")
    inner = model._orig_mod
    if not isinstance(inner, LightningModule):
        raise ValueError(f"`model` is expected to be a compiled LightningModule. Found a `{type(inner).__name__}` instead")
    return inner


def to_uncompiled(model: Any) -> LightningModule:
    """The LightningModule inside a compiled one, as :func:`from_compiled`.

    Raises:
        ValueError: the model is no compiled LightningModule, or not compiled.
    """
    if isinstance(model, LightningModule):
        raise ValueError(f"`model` is required to be a compiled LightningModule. Found an uncompiled `{type(model).__name__}`.")
    return from_compiled(model)
