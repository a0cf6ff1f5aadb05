"""What one op becomes in a captured graph, found out once and copied for every later op that is alike.

``make_fx`` runs decompositions, shape functions and bookkeeping anew for every op that it meets, most of a capture's time, and
the layers of a deep model meet the same ones again and again. What they do is a function of the op, its literal arguments and the
shapes, dtypes and strides of its tensors. So the nodes that an op added to the graph are added again, with the new operands, when
an op comes that is equal in these; its results get the shapes, strides and storages that the first one's had. The graph is
the one that ``make_fx`` alone would make (``tests/xlatrain/bridge/test_expansions.py``). The user's Python, autograd and
functionalization are above this, and run for every op as ever.

Left to ``make_fx``: ops that draw random numbers, change an operand, read values or take constants, and complex numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.fx.node import Node, map_arg
from torch.utils.weak import WeakTensorKeyDictionary

from xlatrain.bridge.patches import patched
from xlatrain.bridge.random import RandomStream
from xlatrain.bridge.tracebacks import note_origin

Key: TypeAlias = tuple[Any, ...]

_CPU = torch.device("cpu")
_LITERALS = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
_READS_OR_DRAWS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


class _NotAlike(Exception):
    """An op that no other is said to be like."""


@dataclass(frozen=True)
class _Result:
    """One tensor that an op returns.

    Attributes:
        node: what it is in the graph.
        alias: the operand of which it is a view, None: memory of its own.
    """

    node: Node
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    alias: int | None

    def make(self, operands: Sequence[FakeTensor]) -> FakeTensor:
        """Another one like it, of other operands."""
        mode: FakeTensorMode = operands[0].fake_mode if self.alias is None else operands[self.alias].fake_mode
        storage = None if self.alias is None else operands[self.alias].untyped_storage()
        with in_kernel_invocation_manager(mode):
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if storage is not None:
                meta.set_(storage, self.offset, self.shape, self.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return FakeTensor(mode, meta, _CPU)


@dataclass(frozen=True)
class _Expansion:
    """What an op became.

    Attributes:
        inputs: the nodes of its tensor operands.
        nodes: those that it added to the graph, and the names that they asked for.
        results: what it returned, None for a result that is none.
        container: ``tuple`` or ``list`` of results; None for a single one.
    """

    inputs: tuple[Node, ...]
    nodes: tuple[tuple[Node, str | None], ...]
    results: tuple[_Result | None, ...]
    container: type | None

    def copy(self, tracer: Any, operands: Sequence[FakeTensor], nodes: Sequence[Node]) -> Any:
        """Add the nodes once more, with ``nodes`` (of ``operands``) in place of the inputs; gives the results."""
        new = dict(zip(self.inputs, nodes, strict=True))
        for node, name in self.nodes:
            args, kwargs = map_arg(node.args, new.__getitem__), map_arg(node.kwargs, new.__getitem__)
            copied = tracer.graph.create_node(node.op, node.target, args, kwargs, name)
            copied.meta["val"] = node.meta["val"]
            new[node] = copied
        note_origin([new[node] for node, _ in self.nodes])
        made = [None if result is None else self._made(result, tracer, operands, new) for result in self.results]
        return made[0] if self.container is None else self.container(made)

    @staticmethod
    def _made(result: _Result, tracer: Any, operands: Sequence[FakeTensor], new: dict[Node, Node]) -> FakeTensor:
        tensor = result.make(operands)
        proxy = torch.fx.Proxy(new[result.node], tracer)
        proxy_tensor.set_proxy_slot(tensor, tracer, proxy_tensor._ProxyTensor(proxy, None))
        return tensor


class Expansions:
    """``with Expansions(stream).copied(): graph = make_fx(…)(…)``; for one capture.

    Args:
        stream: of the capture: what draws from it is not copied.
    """

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream
        self._known: dict[Key, _Expansion | None] = {}
        self._expand = proxy_tensor.proxy_call

    @contextlib.contextmanager
    def copied(self) -> Iterator[None]:
        """Within the block ``make_fx`` copies what it has done before."""
        with patched([(proxy_tensor, "proxy_call", self._call)]):
            yield

    def _call(self, mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            key, operands, nodes = _key(func, args, kwargs, mode.tracer)
        except _NotAlike:
            return self._expand(mode, func, pre_dispatch, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            return known.copy(mode.tracer, operands, nodes)
        if key in self._known:
            return self._expand(mode, func, pre_dispatch, args, kwargs)
        last, drawn = next(iter(reversed(mode.tracer.graph.nodes))), self._stream.index
        result = self._expand(mode, func, pre_dispatch, args, kwargs)
        fresh = _nodes_after(last)
        drew = self._stream.index != drawn
        self._known[key] = None if drew else _expansion(operands, nodes, fresh, result, mode.tracer)
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Any) -> tuple[Key, list[FakeTensor], list[Node]]:
    """What ops that are alike have in common, the tensor operands, and their nodes.

    Raises:
        _NotAlike: it must be expanded by itself.
    """
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or any(tag in func.tags for tag in _READS_OR_DRAWS):
        raise _NotAlike
    words: list[Any] = [func, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()]
    operands: list[FakeTensor] = []
    _describe(args, words, operands)
    for name, value in kwargs.items():
        words.append(name)
        _describe(value, words, operands)
    if not operands:
        raise _NotAlike
    nodes = [_node(tensor, tracer.tensor_tracker) for tensor in operands]
    first: dict[Node, int] = {}
    words.extend(first.setdefault(node, i) for i, node in enumerate(nodes))  # which operands are the same one
    return tuple(words), operands, nodes


def _describe(value: Any, words: list[Any], operands: list[FakeTensor]) -> None:
    """Add to ``words`` what an argument has in common with others that are alike."""
    kind = type(value)
    if kind in _LITERALS:
        words.append((kind, value))
    elif kind is float:
        words.append(repr(value))  # 0.0 and -0.0 are equal
    elif kind is FakeTensor:
        if value.is_complex() or value.layout != torch.strided or value.device != _CPU:
            raise _NotAlike
        operands.append(value)
        words.append((value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad))
    elif kind is list or kind is tuple:
        words.append((kind, len(value)))
        for one in value:
            _describe(one, words, operands)
    else:
        raise _NotAlike


def _node(tensor: FakeTensor, tracker: WeakTensorKeyDictionary) -> Node:
    known: Any = tracker.get(tensor)
    if known is None or known.constant is not None:
        raise _NotAlike
    return known.proxy.node


def _nodes_after(last: Node) -> list[Node]:
    found = []
    node = last.next
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def _expansion(operands: Sequence[FakeTensor], inputs: Sequence[Node], fresh: list[Node], result: Any, tracer: Any) -> Any:
    """What an op became; None if that may not be copied."""
    inside = {*inputs, *fresh}
    if any(node.op != "call_function" or "val" not in node.meta or not inside.issuperset(node.all_input_nodes) for node in fresh):
        return None
    container = type(result) if type(result) in (tuple, list) else None
    try:
        results = [_result(one, operands, fresh, tracer) for one in (result if container else [result])]
    except _NotAlike:
        return None
    return _Expansion(tuple(inputs), tuple((node, _name(node)) for node in fresh), tuple(results), container)


def _result(value: Any, operands: Sequence[FakeTensor], fresh: list[Node], tracer: Any) -> _Result | None:
    if value is None:
        return None
    if type(value) is not FakeTensor or value.is_complex() or value.layout != torch.strided or value.device != _CPU:
        raise _NotAlike
    node = _node(value, tracer.tensor_tracker)
    if node not in fresh or value.requires_grad or value.constant is not None:
        raise _NotAlike
    of = value.untyped_storage()
    alias = next((i for i, operand in enumerate(operands) if operand.untyped_storage()._cdata == of._cdata), None)
    shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
    if alias is None and (offset != 0 or of.nbytes() != _dense_bytes(shape, stride, value.element_size())):
        raise _NotAlike
    return _Result(node, shape, stride, offset, value.dtype, alias)


def _dense_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))


def _name(node: Node) -> str | None:
    """The name that ``make_fx`` asks for: the op's without its overload."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else node.graph._target_to_str(packet.__name__)
