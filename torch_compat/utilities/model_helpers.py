"""Questions about modules and data modules (``lightning.pytorch.utilities.model_helpers``)."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import Mock

from lightning_utilities.core.imports import module_available
from torch import nn


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


def unwrapped(method: Any) -> Any:
    """The method inside of one that is wrapped (``functools.wraps``), mocked (None: a mock around nothing) or partial."""
    if isinstance(method, Mock):
        return vars(method).get("_mock_wraps")
    method = getattr(method, "__wrapped__", method)
    return method.func if isinstance(method, functools.partial) else method


def _base_of(instance: object) -> type[object]:
    from torch_compat.callbacks import Callback
    from torch_compat.core.datamodule import LightningDataModule
    from torch_compat.core.module import LightningModule

    for base in (LightningModule, LightningDataModule, Callback):
        if isinstance(instance, base):
            return base
    raise ValueError(
        "Expected a LightningModule, a LightningDataModule or a Callback, or an explicit `parent`;"
        f" found {type(instance).__name__}."
    )


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """A model of ``torchvision.models`` by name; ``ModuleNotFoundError`` without torchvision."""
    if not module_available("torchvision"):
        raise ModuleNotFoundError("`get_torchvision_model` needs torchvision: pip install torchvision", name="torchvision")
    import torchvision  # pyright: ignore[reportMissingImports]

    return torchvision.models.get_model(model_name, **kwargs)


class _ModuleMode:
    """Remembers which submodules are in train mode."""

    def __init__(self) -> None:
        self.mode: dict[str, bool] = {}

    def capture(self, module: nn.Module) -> None:
        """Takes the present modes."""
        self.mode = {name: submodule.training for name, submodule in module.named_modules()}

    def restore(self, module: nn.Module) -> None:
        """Sets the modes taken; modules that came later are left alone."""
        for name, submodule in module.named_modules():
            submodule.training = self.mode.get(name, submodule.training)
