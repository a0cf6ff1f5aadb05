"""The summary of a layer: a line of a model summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

UNKNOWN_SIZE = "?"


class LayerSummary:
    """Type, parameters and, after a forward, sizes of one layer; use :meth:`detach_hook` when that forward is done.

    Args:
        module: the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._in_size: Any = None
        self._out_size: Any = None
        # ScriptModules take no hooks that see what they get.
        scripted = isinstance(module, torch.jit.ScriptModule)
        self._handle: RemovableHandle | None = None if scripted else module.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        inputs: Any = args or tuple(kwargs.values())
        # A single argument is shown without a list around it.
        self._in_size = parse_batch_shape(inputs[0] if len(inputs) == 1 else inputs)
        self._out_size = parse_batch_shape(output)
        self.detach_hook()

    def detach_hook(self) -> None:
        """Removes the forward hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def in_size(self) -> str | list[Any]:
        """Shape of the input, or a list of shapes; ``"?"`` before a forward."""
        return self._in_size or UNKNOWN_SIZE

    @property
    def out_size(self) -> str | list[Any]:
        """Shape of the output, or a list of shapes; ``"?"`` before a forward."""
        return self._out_size or UNKNOWN_SIZE

    @property
    def layer_type(self) -> str:
        """The class's name."""
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Numbers in the layer's parameters, those of its children included; 0 for uninitialised ones."""
        return sum(parameter_count(parameter) for parameter in self._module.parameters())

    @property
    def training(self) -> bool:
        """Whether it is in train mode."""
        return self._module.training


def parameter_count(parameter: torch.Tensor) -> int:
    """Numbers in a parameter's global shape; 0 before a lazy module's first forward."""
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.numel()


def parse_batch_shape(batch: Any) -> str | list[Any]:
    """The shape of a tensor, a list of those of a list or tuple, ``"?"`` for anything else."""
    if isinstance(batch, torch.Tensor):
        return list(batch.shape)
    if isinstance(batch, (list, tuple)):
        return [parse_batch_shape(item) for item in batch]
    return UNKNOWN_SIZE
