"""The slice of the tape that computes one tensor, and a description of that computation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.lazy_init.tape import Constant, Geometry, Node, Operand, Storage, is_place, operand_of

aten = torch.ops.aten


@dataclass(eq=False)
class Slice:
    """The ops that one tensor depends on.

    Attributes:
        target: the tensor.
        nodes: the ops, in order.
    """

    target: Operand
    nodes: list[Node]

    @classmethod
    def from_target(cls, target: Operand) -> Slice:
        """The slice of ``target`` as it is now."""
        needed: dict[int, Node] = {}
        todo: list[tuple[Storage, int]] = [(target.storage, 1 << 62)]
        walked: set[tuple[Storage, int]] = set()
        while todo:
            storage, before = todo.pop()
            for node in reversed(storage.writes):
                if node.index >= before:
                    continue
                if (storage, node.index) in walked:
                    break  # older ops were walked with it, but for those that a later overwriting cuts off
                walked.add((storage, node.index))
                if node.index not in needed:
                    needed[node.index] = node
                todo.extend((read, node.index) for read in node.reads if read is not node.overwrites)
                if node.overwrites is storage:
                    maker = storage.writes[0]  # still says what the storage is, but its own arguments are not needed
                    needed[maker.index] = maker
                    todo.extend((read, maker.index) for read in maker.reads)
                    break
        return cls(target, [needed[index] for index in sorted(needed)])

    @cached_property
    def constants(self) -> list[Constant]:
        """The tensors with values that it uses, each once."""
        found: dict[int, Constant] = {}
        for node in self.nodes:
            for leaf in pytree.tree_leaves((node.args, node.kwargs), is_leaf=is_place):
                if isinstance(leaf, Constant):
                    found.setdefault(id(leaf.tensor), leaf)
        return list(found.values())

    @cached_property
    def random(self) -> list[Node]:
        """The random ops among the nodes, in order."""
        return [node for node in self.nodes if node.draw is not None]

    @property
    def storages(self) -> set[Storage]:
        """The storages that computing the slice would take memory for."""
        touched = (storage for node in self.nodes for storage in (*node.reads, *node.outputs))
        return {storage for storage in touched if storage is not None}

    @property
    def given(self) -> Constant | None:
        """The tensor whose values the target simply has, or None where something must be computed."""
        last = self.nodes[-1] if self.nodes else None
        if last is None or last.func is not aten.copy_.default or last.overwrites is not self.target.storage:
            return None
        written, source = last.args[:2]
        same = isinstance(source, Constant) and written.geometry == self.target.geometry
        return source if same and tuple(source.tensor.shape) == self.target.geometry.size else None

    @cached_property
    def signature(self) -> Hashable:
        """Equal for slices that are the same computation, up to the values of constants and the names of draws."""
        numbers: dict[Storage, int] = {}
        places = {id(constant.tensor): i for i, constant in enumerate(self.constants)}

        def number(storage: Storage) -> int:
            return numbers.setdefault(storage, len(numbers))

        def described(leaf: Any) -> Hashable:
            if isinstance(leaf, Operand):
                return "operand", number(leaf.storage), leaf.geometry, _chain(leaf)
            if isinstance(leaf, Constant):
                return "constant", places[id(leaf.tensor)], tuple(leaf.tensor.shape), leaf.tensor.dtype
            return type(leaf).__name__, leaf if isinstance(leaf, Hashable) else repr(leaf)

        parts: list[Hashable] = []
        for node in self.nodes:
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs), is_leaf=is_place)
            made = tuple(None if storage is None else (number(storage), storage.root) for storage in node.outputs)
            parts.append((node.func, tuple(described(leaf) for leaf in leaves), repr(spec), made))
        return (*parts, described(self.target))

    def replay(self, constants: Sequence[torch.Tensor], draw: Callable[[int, Node, Any, Any], Any]) -> torch.Tensor:
        """Run the ops again.

        Args:
            constants: stand for :attr:`constants`; not changed.
            draw: ``(number, node, args, kwargs)`` → the result of the ``number``-th random op.
        """
        tensors: dict[tuple[Storage, Geometry], torch.Tensor] = {}
        given = {id(constant.tensor): tensor for constant, tensor in zip(self.constants, constants, strict=True)}

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return resolve(leaf, tensors)
            return given[id(leaf.tensor)] if isinstance(leaf, Constant) else leaf

        drawn = 0
        with torch.no_grad():
            for node in self.nodes:
                args, kwargs = pytree.tree_map(value, (node.args, node.kwargs), is_leaf=is_place)
                if node.draw is None:
                    result = node.func(*args, **kwargs)
                else:
                    result = draw(drawn, node, args, kwargs)
                    drawn += 1
                if node.func is aten.empty_strided.default:
                    result.zero_()  # elements that no op writes are zero, not whatever is in memory
                flat = pytree.tree_leaves(result)
                for tensor, storage in zip(flat, node.outputs, strict=False):
                    if storage is not None:
                        tensors[storage, storage.root] = tensor
            return resolve(self.target, tensors)


def _chain(operand: Operand) -> Hashable:
    """The chain of view ops by which the operand is derived from the root of its storage."""
    view = operand.storage.views.get(operand.geometry)
    if view is None:
        return None
    return view.func, repr(view.args), repr(view.kwargs), view.output, _chain(Operand(operand.storage, view.parent))


def resolve(operand: Operand, tensors: dict[tuple[Storage, Geometry], torch.Tensor]) -> torch.Tensor:
    """The tensor for an operand, as a view of its storage's root, which ``tensors`` has. Views on the way are added to it."""
    found = tensors.get(operand)
    if found is not None:
        return found
    storage, geometry = operand
    view = storage.views.get(geometry)
    if view is None:
        root = tensors[storage, storage.root]
        tensor = root.view(geometry.dtype) if geometry.dtype != root.dtype else root
        tensor = tensor.as_strided(geometry.size, geometry.stride, geometry.offset)
    else:
        parent = resolve(Operand(storage, view.parent), tensors)
        tensor = pytree.tree_leaves(view.func(parent, *view.args, **view.kwargs))[view.output]
    tensors[operand] = tensor
    return tensor


def describe_recorded(tensor: torch.Tensor) -> str:
    """The computation behind a deferred tensor, with the names of its draws, as text: the same where the same was recorded."""
    operand = operand_of(tensor)
    assert operand is not None
    piece = Slice.from_target(operand)
    names = [(node.draw.seed, node.draw.name) for node in piece.random if node.draw is not None]
    return f"{piece.signature} {names}"
