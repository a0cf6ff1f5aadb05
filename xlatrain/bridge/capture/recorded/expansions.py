"""Expansions of ops: the nodes that an op becomes in a captured graph, found once and copied for every later op that is alike.

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
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.node import Node
from torch.utils.weak import WeakTensorKeyDictionary

from xlatrain.bridge.capture.recorded.fake_results import FakeResult, Fakes, NotAlike, describe, look_of
from xlatrain.bridge.capture.tracebacks import note_origin
from xlatrain.bridge.graph_nodes import Expansion, last_node, nodes_after, stands_for
from xlatrain.bridge.patches import patched
from xlatrain.bridge.random import RandomStream

Key: TypeAlias = tuple[Any, ...]

_READS_OR_DRAWS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


@dataclass(frozen=True)
class _Known:
    """An op that was expanded.

    Attributes:
        expansion: the nodes that it became.
        results: what it returned, and which of these nodes that is; None for a result that is none.
        container: ``tuple`` or ``list`` of results; None for a single one.
    """

    expansion: Expansion
    results: tuple[tuple[int, FakeResult] | None, ...]
    container: type | None

    def copy(self, tracer: Any, fakes: Fakes, operands: Sequence[FakeTensor], nodes: Sequence[Node]) -> Any:
        """Add the nodes once more, with ``nodes`` (of ``operands``) in place of the inputs; gives the results."""
        new = self.expansion.copy(tracer.graph, nodes, 0)
        note_origin(new)
        made = [None if one is None else one[1].make(fakes, operands) for one in self.results]
        for tensor, one in zip(made, self.results, strict=True):
            if tensor is not None and one is not None:
                stands_for(tensor, new[one[0]], tracer)
        return made[0] if self.container is None else self.container(made)


class Expansions:
    """The expansions of one capture: ``with Expansions(stream).copied(): graph = make_fx(…)(…)``.

    Args:
        stream: of the capture: what draws from it is not copied.
    """

    def __init__(self, stream: RandomStream) -> None:
        self._stream = stream
        self._known: dict[Key, _Known | None] = {}
        self._fakes: Fakes | None = None
        self._expand = proxy_tensor.proxy_call

    @contextlib.contextmanager
    def copied(self) -> Iterator[None]:
        """Within the block ``make_fx`` copies what it has done before."""
        with patched([(proxy_tensor, "proxy_call", self._call)]):
            yield

    def _call(self, mode: Any, func: Any, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            key, operands, nodes = _key(func, args, kwargs, mode.tracer)
        except NotAlike:
            return self._expand(mode, func, pre_dispatch, args, kwargs)
        known = self._known.get(key)
        if known is not None:
            if self._fakes is None or self._fakes.mode is not operands[0].fake_mode:
                self._fakes = Fakes(operands[0].fake_mode)
            return known.copy(mode.tracer, self._fakes, operands, nodes)
        if key in self._known:
            return self._expand(mode, func, pre_dispatch, args, kwargs)
        last, drawn = last_node(mode.tracer.graph), self._stream.index
        result = self._expand(mode, func, pre_dispatch, args, kwargs)
        fresh = nodes_after(last)
        drew = self._stream.index != drawn
        self._known[key] = None if drew else _known(operands, nodes, fresh, result, mode.tracer)
        return result


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Any) -> tuple[Key, list[FakeTensor], list[Node]]:
    """The properties that ops which are alike have in common, the tensor operands, and their nodes.

    Raises:
        NotAlike: it must be expanded by itself.
    """
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or any(tag in func.tags for tag in _READS_OR_DRAWS):
        raise NotAlike
    words: list[Any] = [func, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()]
    operands: list[FakeTensor] = []
    describe(args, words, operands, look_of)
    for name, value in kwargs.items():
        words.append(name)
        describe(value, words, operands, look_of)
    if not operands:
        raise NotAlike
    nodes = [_node(tensor, tracer.tensor_tracker) for tensor in operands]
    first: dict[Node, int] = {}
    words.extend(first.setdefault(node, i) for i, node in enumerate(nodes))  # operands that are the same node get the same number
    return tuple(words), operands, nodes


def _node(tensor: FakeTensor, tracker: WeakTensorKeyDictionary) -> Node:
    known: Any = tracker.get(tensor)
    if known is None or known.constant is not None:
        raise NotAlike
    return known.proxy.node


def _known(operands: Sequence[FakeTensor], inputs: Sequence[Node], fresh: list[Node], result: Any, tracer: Any) -> _Known | None:
    """The op as it is copied; None if it must not be."""
    expansion = Expansion.from_nodes(inputs, fresh, 0)
    if expansion is None:
        return None
    container = type(result) if type(result) in (tuple, list) else None
    try:
        results = [_result(one, operands, fresh, tracer) for one in (result if container else [result])]
    except NotAlike:
        return None
    return _Known(expansion, tuple(results), container)


def _result(value: Any, operands: Sequence[FakeTensor], fresh: list[Node], tracer: Any) -> tuple[int, FakeResult] | None:
    found = FakeResult.from_value(value, operands)
    if found is None:
        return None
    node = _node(value, tracer.tensor_tracker)
    if node not in fresh:
        raise NotAlike
    return fresh.index(node), found
