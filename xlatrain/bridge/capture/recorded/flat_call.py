"""The arguments of a call that is run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xlatrain.bridge.capture.recorded.fake_results import Fakes


class FlatCall:
    """The arguments of a call, their tensors apart.

    Attributes:
        mode: of the fake tensors.
        fakes: one fake CPU tensor per tensor leaf; a tensor given twice stays one tensor.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._leaves, self._spec = pytree.tree_flatten(args)
        made = Fakes(self.mode)
        memo: dict[int, FakeTensor] = {}
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if id(tensor) not in memo:
                memo[id(tensor)] = made.like(tensor)
        self.fakes = [memo[id(tensor)] for tensor in tensors]

    def args_with(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The arguments with ``tensors`` in place of their own."""
        given = iter(tensors)
        rebuilt = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(rebuilt, self._spec)
