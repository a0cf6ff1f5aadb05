"""Modules whose parameters are not there yet. API: ``lightning.fabric.utilities.init``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.types import _DEVICE


class _EmptyInit(TorchFunctionMode):
    """Leaves out the functions of ``torch.nn.init`` inside, for a model whose checkpoint is loaded next.

    Args:
        enabled: False leaves everything as it is.
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if self.enabled and getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _materialize(module: nn.Module, device: _DEVICE) -> None:
    """Give ``module``'s own parameters and buffers memory on ``device``, and values by its ``reset_parameters()``.

    Raises:
        TypeError: it has none.
    """
    module.to_empty(device=device, recurse=False)
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise TypeError(
            f"Materialization requires that the `{type(module).__name__}.reset_parameters` method is implemented: it fills the "
            "parameters and buffers that the module itself has, for which there is memory only now."
        )
    reset()


def _materialize_meta_tensors(module: nn.Module, device: _DEVICE) -> None:
    """:func:`_materialize` for each submodule with parameters or buffers on the meta device."""
    for submodule in module.modules():
        if _has_meta_device_parameters_or_buffers(submodule, recurse=False):
            _materialize(submodule, device)


def _has_meta_device_parameters_or_buffers(obj: nn.Module | Optimizer, recurse: bool = True) -> bool:
    """Whether a module, or the parameters of an optimizer, have tensors on the meta device.

    Raises:
        TypeError: neither of the two.
    """
    if isinstance(obj, Optimizer):
        return any(tensor.is_meta for group in obj.param_groups for tensor in group["params"] if isinstance(tensor, nn.Parameter))
    if isinstance(obj, nn.Module):
        return any(tensor.is_meta for tensor in itertools.chain(obj.parameters(recurse=recurse), obj.buffers(recurse=recurse)))
    raise TypeError(f"Expected `torch.nn.Module` or `torch.optim.Optimizer`, got: {type(obj)}")


def _materialize_distributed_module(module: nn.Module, device: torch.device) -> None:
    """:func:`_materialize_meta_tensors`, with a warning instead of an error for modules without ``reset_parameters``."""
    empty = [one for one in module.modules() if _has_meta_device_parameters_or_buffers(one, recurse=False)]
    without = [type(one).__name__ for one in empty if not callable(getattr(one, "reset_parameters", None))]
    if without:
        rank_zero_warn(
            "Parameter initialization incomplete. The following modules have parameters or buffers with uninitialized memory:"
            f" {', '.join(without)}. They have no `reset_parameters()` that would fill them: write one, or load a checkpoint."
        )
    for one in empty:
        if callable(getattr(one, "reset_parameters", None)):
            _materialize(one, device)
        else:
            one.to_empty(device=device, recurse=False)
