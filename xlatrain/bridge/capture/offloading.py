"""Saved activations that lie in the memory of the host between forward and backward pass.

``torch.autograd.graph.save_on_cpu`` in a step, and :func:`offloaded` around modules: what autograd saves there goes to host
memory where it is saved, and comes back where the backward pass unpacks it. Captured, these are the ops ``xlatrain::to_host`` and
``xlatrain::to_device``, transfers inside of the program; a layer under ``torch.utils.checkpoint`` saves its inputs only, so that
both together keep nothing of it on the device. Numbers do not change.

Two kinds of transfers would gain nothing and are left out of the graph: parameters and batches, and views and casts of them, are
on the device throughout; what several ops save is sent once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.fx.node import Node

from xlatrain.bridge.capture.rematerialization import define_identity, forwards
from xlatrain.bridge.graph_nodes import op_name
from xlatrain.bridge.patches import patched

define_identity("to_host")
define_identity("to_device")

TO_HOST, TO_DEVICE = torch.ops.xlatrain.to_host.default, torch.ops.xlatrain.to_device.default
_IDENTITIES = ("alias", "detach")
_FREE = frozenset((
    *_IDENTITIES, "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "squeeze", "unsqueeze", "clone",
    "select", "reshape", "diagonal", "_to_copy", "split_rows", "split_features", "whole_over_fsdp",
))  # fmt: skip
"""Ops whose result is as much on the device as what they are given."""


@contextlib.contextmanager
def offloading_save_on_cpu() -> Iterator[None]:
    """Within the block, where steps are captured, torch's ``save_on_cpu`` means the host of the mesh's devices.

    On the fake CPU tensors of a capture its own hooks copy nothing. ``pin_memory`` makes no difference: a device of a mesh
    reaches pinned memory only.
    """

    def enter(self: save_on_cpu) -> None:
        saved_tensors_hooks(_to_host, _to_device).__enter__()  # torch's own __exit__ takes the innermost away

    with patched([(save_on_cpu, "__enter__", enter)]):
        yield


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The saved tensor in host memory; scalars and sparse tensors stay where they are."""
    return TO_HOST(tensor) if tensor.layout == torch.strided and tensor.ndim else tensor


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_to_host`."""
    return TO_DEVICE(tensor) if tensor.layout == torch.strided and tensor.ndim else tensor


@contextlib.contextmanager
def offloaded(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block, what these modules save for the backward pass is saved as under ``save_on_cpu``."""
    with forwards(modules, _saving_on_host):
        yield


def _saving_on_host(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def saving(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return forward(*args, **kwargs)

    return saving


def offloads(graph: torch.fx.Graph) -> bool:
    """Whether activations of the graph go to host memory."""
    return any(node.target is TO_HOST for node in graph.nodes)


def without_needless_transfers(graph: torch.fx.Graph) -> None:
    """Takes those transfers out of a captured graph that gain nothing, see above."""
    stays: set[Node] = set()
    sent: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr") or (op_name(node) in _FREE and stays.issuperset(node.all_input_nodes)):
            stays.add(node)
        elif node.target is TO_HOST:
            source = _itself(cast(Node, node.args[0]))
            if source in stays:
                _stay(node, source)
            elif source in sent:
                node.replace_all_uses_with(sent[source])
            else:
                sent[source] = node


def _stay(sent: Node, source: Node) -> None:
    for user in list(sent.users):
        if user.target is TO_DEVICE:
            user.replace_all_uses_with(source)
    sent.replace_all_uses_with(source)


def _itself(node: Node) -> Node:
    """The node that ``node`` is another name of, or ``node``."""
    while op_name(node) in _IDENTITIES:
        node = cast(Node, node.args[0])
    return node
