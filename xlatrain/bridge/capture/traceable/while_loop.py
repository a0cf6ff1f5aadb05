"""A loop whose end only the running program knows, as one op: ``xlatrain::while_loop``, lowered to ``lax.while_loop``.

The body is captured into a graph of its own (:func:`xlatrain.bridge.capture.capture.capture_part`). No gradient flows through it.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.tensors.constants import contents_of

if TYPE_CHECKING:
    from xlatrain.bridge.capture.capture import Capture

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("while_loop(Tensor[] carried, Tensor[] constants, int loop) -> Tensor[]")

CapturePart = Callable[..., "Capture"]
"""Captures a function of tensors into a graph of its own, while a capture is going on."""


@dataclass(eq=False)
class WhileLoop:
    """A loop.

    Attributes:
        body: the graph of ``(*carried, *constants) -> carried``.
        number: by which ops name it.
    """

    body: Capture
    number: int


_LOOPS: weakref.WeakValueDictionary[int, WhileLoop] = weakref.WeakValueDictionary()
_OF_OWNER: weakref.WeakKeyDictionary[Any, dict[str, WhileLoop]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def while_loop(
    owner: Any,
    body: Callable[[list[torch.Tensor], list[torch.Tensor]], list[torch.Tensor]],
    carried: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
    capture_part: CapturePart,
) -> list[torch.Tensor]:
    """Run ``carried = body(carried, constants)`` for as long as ``carried[0]``, a bool scalar, is true.

    Args:
        owner: keeps the loop for as long as it lives: whose steps have the op in their graphs. Equal bodies are one loop of it.
        body: gives tensors of the shapes and dtypes of ``carried``. Its draws are other ones in each turn.

    Raises:
        ValueError: the body gives tensors of other shapes or dtypes.
    """
    carried, constants = list(carried), list(constants)
    graph = capture_part(lambda *tensors: body([*tensors[: len(carried)]], [*tensors[len(carried) :]]), *carried, *constants)
    for place, (given, made) in enumerate(zip(carried, graph.outputs, strict=True)):
        if (tuple(given.shape), given.dtype) != (made.shape, made.dtype):
            raise ValueError(f"the body of a loop makes {made} of its {place}-th tensor, {given.dtype} {tuple(given.shape)}")
    loops = _OF_OWNER.setdefault(owner, {})
    text = "".join([graph.computation, *(f"{one.dtype} {contents_of(one)}" for one in graph.constants.values())])
    key = hashlib.sha256(f"{text} {graph.inputs} {graph.outputs}".encode()).hexdigest()
    if key not in loops:
        loops[key] = WhileLoop(graph, next(_numbers))
        _LOOPS[loops[key].number] = loops[key]
    if graph.uses_random:  # two words of a key, drawn from the step's stream
        constants.append(torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64))
    return list(torch.ops.xlatrain.while_loop(carried, constants, loops[key].number))


def loop_of(number: int) -> WhileLoop:
    """The loop that a node of a graph names.

    Raises:
        RuntimeError: its owner is gone.
    """
    if (loop := _LOOPS.get(number)) is None:
        raise RuntimeError(
            f"the loop {number} of a captured graph is gone: keep the module that was captured as long as the graph"
        )
    return loop


@fake_kernel(_LIBRARY, "while_loop")
def _fake(carried: Sequence[torch.Tensor], constants: Sequence[torch.Tensor], loop: int) -> list[torch.Tensor]:
    """Tensors like ``carried``."""
    return [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in carried]
