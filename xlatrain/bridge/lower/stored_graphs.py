"""Captured graphs that outlive their process: found by the ops that ran, before functionalization and decomposition.

Those are a function of the ops (:mod:`xlatrain.bridge.capture.op_log`), of torch and of our own sources. So the graph of a run
whose ops another process had, too, is read instead of made. It has no code in it: its ops are those of this process by their
names, its constants the tensors that this run was given, its nodes come from the user's lines of this run.

What is stored is what has a :func:`~xlatrain.bridge.lower.graph_text.graph_text`, with constants that are told by their values.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.node import Node, map_arg

from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.capture.op_facts import resolve
from xlatrain.bridge.capture.recorded.fake_results import FakeResult, Fakes
from xlatrain.bridge.capture.torchs_own import implementations_are_torchs, kernels_are_torchs, told_of_torch
from xlatrain.bridge.capture.tracebacks import Origin, in_backward, place_of_origin, set_origin
from xlatrain.bridge.lower.graph_text import graph_digest
from xlatrain.bridge.lower.registry import all_are_ours
from xlatrain.xla import kept_files
from xlatrain.xla.told import NotToldError

_KIND = "graph"


class _Value(NamedTuple):
    """The place of a node among the nodes."""

    place: int


def key_of(*parts: str) -> str | None:
    """The key of the graph of a run that ``parts`` tell of; None where none is stored."""
    if not (kept_files.are_kept() and kernels_are_torchs()):
        return None
    return kept_files.key_of(_KIND, told_of_torch(), *parts)


def write(key: str, capture: Capture, outside: Sequence[torch.Tensor], origins: Sequence[Origin]) -> None:
    """Store a graph.

    Args:
        outside: the tensors that the run was given and the function was not, in an order that all such runs have.
        origins: of the ops that ran.
    """
    places = {id(one): place for place, one in enumerate(outside)}
    constants = {name: places.get(id(one)) for name, one in capture.constants.items()}
    if None in constants.values():
        return
    nodes = list(capture.graph.graph.nodes)
    if not implementations_are_torchs({node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)}):
        return
    numbers = {node: _Value(number) for number, node in enumerate(nodes)}
    of_frames = {id(one.frames): place for place, one in enumerate(origins)}
    looks: dict[Any, int] = {}
    rows = []
    try:
        digest = graph_digest(capture)
        for node in nodes:
            given = map_arg((node.args, node.kwargs), cast(Any, numbers.__getitem__))
            value, backward, origin = _shown(node.meta.get("val"), looks), in_backward(node), place_of_origin(node, of_frames)
            rows.append((node.op, node.name, str(_target(node)), given, value, backward, origin))
    except NotToldError:
        return
    rest = (capture.inputs, capture.outputs, capture.result, capture.uses_random, capture.host_draws)
    kept_files.write(_KIND, key, pickle.dumps((rows, list(looks), constants, rest, digest)))


def read(key: str, outside: Sequence[torch.Tensor], origins: Sequence[Origin]) -> Capture | None:
    """The graph that is stored, for the arguments see :func:`write`; None where there is none."""
    contents = kept_files.read(_KIND, key) if all_are_ours() else None
    if contents is None:
        return None
    try:
        return _capture(pickle.loads(contents), outside, origins)
    except Exception as error:
        kept_files.forget(_KIND, key, f"{type(error).__name__}: {str(error)[:200]}")
        return None


def _capture(stored: Any, outside: Sequence[torch.Tensor], origins: Sequence[Origin]) -> Capture | None:
    rows, looks, places, rest, digest = stored
    fakes = Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    values = [FakeResult(shape, strides, 0, dtype, None).make(fakes, ()) for dtype, shape, strides in looks]
    constants = {name: outside[place] for name, place in places.items()}
    graph, made = torch.fx.Graph(), []
    ops: dict[str, Any] = {}
    for op, name, target, (args, kwargs), value, backward, origin in rows:
        if op == "call_function" and target not in ops:
            name_of_ours, _, operation = target.partition("operator ")
            ops[target] = getattr(operator, operation) if operation else resolve(name_of_ours)
        args, kwargs = _with_nodes(args, made), _with_nodes(kwargs, made)
        node = graph.create_node(op, ops[target] if op == "call_function" else target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"{name} became {node.name}")
        if value is not None:
            node.meta["val"] = _value(value, values)
        set_origin(node, None if origin is None else origins[origin].frames, backward)
        made.append(node)
    if not implementations_are_torchs(one for one in ops.values() if isinstance(one, torch._ops.OpOverload)):
        return None
    with _use_lazy_graph_module(True):
        module = _make_graph_module(constants, graph)
    inputs, outputs, result, draws, host_draws = rest
    return Capture(module, inputs, outputs, result, constants, draws, host_draws, digest=digest)


def _target(node: Node) -> Any:
    of_python = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    return f"operator {cast(Any, node.target).__name__}" if of_python else node.target


def _shown(value: Any, looks: dict[Any, int]) -> Any:
    """The numbers of the looks of a node's values.

    Raises:
        NotToldError: it has others than plain tensors.
    """
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [type(value), *[_shown(one, looks) for one in value]]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise NotToldError(f"{type(value).__qualname__} is no plain tensor")
    return looks.setdefault((value.dtype, tuple(value.shape), value.stride()), len(looks))


def _value(shown: Any, values: Sequence[torch.Tensor]) -> Any:
    if isinstance(shown, list):
        return shown[0]([_value(one, values) for one in shown[1:]])
    return None if shown is None else values[shown]


def _with_nodes(value: Any, nodes: Sequence[Node]) -> Any:
    """Arguments with nodes in their places."""
    if isinstance(value, _Value):
        return nodes[value.place]
    if isinstance(value, tuple):
        return tuple([_with_nodes(one, nodes) for one in value])
    if isinstance(value, list):
        return [_with_nodes(one, nodes) for one in value]
    if isinstance(value, dict):
        return {name: _with_nodes(one, nodes) for name, one in value.items()}
    return value
