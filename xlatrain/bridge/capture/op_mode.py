"""A dispatch mode that sees every op which computes something."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from xlatrain.bridge.capture.op_facts import OpFacts, facts_of

_DEVICE = torch.ops.prim.device.default


class OpMode(TorchDispatchMode):
    """A mode in which :meth:`op` runs each op; higher-order ops come as they are."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else every call goes through a wrapper; nothing is compiled here
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # autograd asks for it with every op, and it takes as long as one
            return args[0].fake_device
        kwargs = kwargs or {}
        facts = facts_of(func)
        return self.op(facts, types, args, kwargs) if facts.computes else func(*args, **kwargs)

    @abstractmethod
    def op(self, facts: OpFacts, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and return the result for its caller."""
