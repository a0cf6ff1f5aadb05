"""The lines of the user's code from which the ops of a captured graph come, looked up only when somebody asks.

``make_fx(record_stack_traces=True)`` turns every op's stack into text at once, a third of a capture's time. Here each node keeps
the raw frames (a few µs), which become lines when an error or a printed graph needs them.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.node import Node
from torch.utils._traceback import CapturedTraceback

from xlatrain.bridge.errors import user_line
from xlatrain.bridge.patches import patched

_META = "xlatrain_traceback"
_BACKWARD = "xlatrain_backward"


@contextlib.contextmanager
def recorded_tracebacks() -> Iterator[None]:
    """Within the block, every node that ``make_fx`` makes keeps its origin."""
    original = PythonKeyTracer.create_node

    def create_node(self: PythonKeyTracer, *args: Any, **kwargs: Any) -> Node:
        node = original(self, *args, **kwargs)
        note_origin([node])
        return node

    with patched([(PythonKeyTracer, "create_node", create_node)]):
        yield


@dataclass(eq=False, slots=True)
class Origin:
    """The origin of an op that was dispatched: raw frames, and whether autograd did it in a backward pass."""

    frames: CapturedTraceback
    backward: bool

    @classmethod
    def here(cls) -> Origin:
        return cls(CapturedTraceback.extract(skip=1), torch._C._current_graph_task_id() != -1)


def note_origin(nodes: Sequence[Node], origin: Origin | None = None) -> None:
    """Nodes keep where they come from: from here and now, if nothing else is said."""
    origin = Origin.here() if origin is None else origin
    for node in nodes:
        node.meta[_META] = origin.frames
        node.meta[_BACKWARD] = origin.backward


def set_origin(node: Node, frames: CapturedTraceback | None, backward: bool) -> None:
    """A node that was made in another process comes from ``frames``; None: from nowhere that is known."""
    if frames is not None:
        node.meta[_META] = frames
    node.meta[_BACKWARD] = backward


def place_of_origin(node: Node, places: Mapping[int, int]) -> int | None:
    """The entry of ``places`` for the frames that a node comes from, by their ids; None for none."""
    return places.get(id(node.meta.get(_META)))


def in_backward(node: Node) -> bool:
    """Whether autograd made a node, recorded as above, in a backward pass."""
    return bool(node.meta.get(_BACKWARD))


def user_line_of(node: Node, boundary: str) -> str | None:
    """``file:line: source`` of the user's code that made ``node``; None for one of the backward pass.

    Args:
        node: made within :func:`recorded_tracebacks`.
        boundary: the file in which the captured function is called: what called the capture is not what made the node.
    """
    found = node.meta.get(_META)
    if found is None:
        return None
    frames = found.summary()
    inner = max((i for i, frame in enumerate(frames) if frame.filename == boundary), default=-1)
    return user_line(traceback.StackSummary.from_list(frames[inner + 1 :]))
