"""Facts about ops, and a dispatch mode that sees every op which computes something.

Facts are looked up once: asking for an op's schema and tags takes longer than most other work on a call.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from xlatrain.bridge.capture.foreign_memory import REAL, copied, is_foreign, tell_lifted
from xlatrain.bridge.random import FILLED, draws

_aten = torch.ops.aten
_MOVES = (_aten.set_, _aten.resize_, _aten.resize_as_)
"""Change more than shape and strides."""
_OF_THE_HOST = ("prim", "profiler")
"""Namespaces of ops that compute nothing: what a tensor subclass is asked about itself, names for a profile."""
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNSAID: dict[Any, tuple[int, ...]] = {
    _aten.native_batch_norm.default: (3, 4),
    _aten.as_strided.default: (0,),
    _aten.as_strided_scatter.default: (0,),
    _aten.as_strided_copy.default: (0,),
}
"""Arguments that count as written though the schema does not say so: running statistics, and where an op depends on the memory
behind a tensor, not only on its elements."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts about one op.

    Attributes:
        func: the op, kept, so that no other gets its id.
        name: ``namespace.name.overload``.
        computes: False for one that is of the host only.
        plain: an ``OpOverload``: a function of its arguments with a schema.
        mutable: whether it writes to an argument.
        draws: whether its last argument is the number of a random draw; such an op is ours.
        seeded: whether it draws from torch's generator.
        reads: whether it needs the values of its operands.
        reshapes: whether it changes the shape or strides of an argument in place.
        writes_elements: of a mutable one, whether it changes more than that.
        unsaid: arguments that count as written though the schema does not say so.
        running: whether these are running statistics.
        known: whether it is torch's, or one of ours whose arguments are all there is to it: it does the same in all runs.
    """

    func: Any
    name: str
    computes: bool
    plain: bool
    mutable: bool
    draws: bool
    seeded: bool
    reads: bool
    reshapes: bool
    writes_elements: bool
    unsaid: tuple[int, ...]
    running: bool
    known: bool

    @classmethod
    def _of(cls, func: Any) -> OpFacts:
        plain = isinstance(func, torch._ops.OpOverload)
        tags = func.tags if plain else ()
        reshapes = torch.Tag.inplace_view in tags
        return cls(
            func=func,
            name=str(func),
            computes=func.namespace not in _OF_THE_HOST,
            plain=plain,
            mutable=plain and func._schema.is_mutable,
            draws=draws(func),
            seeded=torch.Tag.nondeterministic_seeded in tags,
            reads=any(tag in tags for tag in _READS),
            reshapes=reshapes,
            writes_elements=not reshapes or func.overloadpacket in _MOVES,
            unsaid=_UNSAID.get(func, ()),
            running=func is _aten.native_batch_norm.default,
            known=plain and (func.namespace in ("aten", "prims") or (func.namespace == "xlatrain" and func._opname in FILLED)),
        )


def facts_of(func: Any) -> OpFacts:
    """The facts about an op."""
    found = _KNOWN.get(id(func))
    if found is None:
        found = _KNOWN[id(func)] = OpFacts._of(func)
    return found


_KNOWN: dict[int, OpFacts] = {}


def resolve(name: str) -> torch._ops.OpOverload | None:
    """``"aten.add.Tensor"`` → the overload, or None where this torch does not have it (2.11 to 2.13 differ)."""
    namespace, op, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return getattr(packet, overload, None) if packet is not None else None


_DEVICE = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
_LIFT = torch.ops.aten.lift_fresh.default


class OpMode(TorchDispatchMode):
    """A mode in which :meth:`op` runs each op; higher-order ops come as they are."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else every call goes through a wrapper; nothing is compiled here
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # autograd asks for it with every op, and it takes as long as one
            return args[0].fake_device
        kwargs = kwargs or {}
        facts = facts_of(func)
        if func is _DETACH and type(args[0]) in REAL:  # .data, or .numpy(), of a tensor from outside
            with _disable_current_modes():
                return args[0].detach()
        if func is _LIFT and is_foreign(args[0]):
            copy = copied(args[0])
            result = self.op(facts, types, (copy,), kwargs)
            tell_lifted(args[0], copy, result)
            return result
        return self.op(facts, types, args, kwargs) if facts.computes else func(*args, **kwargs)

    @abstractmethod
    def op(self, facts: OpFacts, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and return the result for its caller."""
