"""The question whether a module, data module or callback has its own method (``lightning.pytorch.utilities.model_helpers``)."""

from __future__ import annotations

from torch_compat.callbacks.callback import Callback
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.utilities.model_helpers import unwrapped


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Whether ``instance`` has its own ``method_name`` rather than ``parent``'s.

    Args:
        method_name: the name.
        instance: the object; False for None or where it has no such method.
        parent: the class to compare with. By default LightningModule, LightningDataModule or Callback, as ``instance`` is.

    Raises:
        ValueError: ``instance`` is none of these and no parent is given, or the parent has no such method.
    """
    if instance is None:
        return False
    parent = _base_of(instance) if parent is None else parent
    method = getattr(instance, method_name, None)
    if method is None:
        return False
    method = unwrapped(method)
    if method is None:
        return False
    inherited = getattr(parent, method_name, None)
    if inherited is None:
        raise ValueError(f"The parent {parent.__name__} does not define `{method_name}`.")
    inherited = getattr(inherited, "__wrapped__", inherited)
    return getattr(method, "__code__", method) != getattr(inherited, "__code__", inherited)


def _base_of(instance: object) -> type[object]:
    for base in (LightningModule, LightningDataModule, Callback):
        if isinstance(instance, base):
            return base
    raise ValueError(
        f"Expected a parent, or a LightningModule, a LightningDataModule or a Callback; found {type(instance).__name__}."
    )
