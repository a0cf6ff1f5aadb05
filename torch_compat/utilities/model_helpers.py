"""Questions about modules and data modules (``lightning.pytorch.utilities.model_helpers``)."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import Mock

from lightning_utilities.core.imports import module_available
from torch import nn


def unwrapped(method: Any) -> Any:
    """The method inside of one that is wrapped (``functools.wraps``), mocked (None: a mock around nothing) or partial."""
    if isinstance(method, Mock):
        return vars(method).get("_mock_wraps")
    method = getattr(method, "__wrapped__", method)
    return method.func if isinstance(method, functools.partial) else method


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
