"""How the rows of a batch pass through an op: the rules by which a loop's body is made for a microbatch.

Each rule says where the rows of an op's results are, given where its operands have theirs, and rewrites the sizes among its
arguments for a part of the rows. What a rule does not cover mixes rows, or may: it raises :class:`Mixes`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx.node import Node

from xlatrain.bridge.graph_nodes import op_name
from xlatrain.bridge.random import draws


@dataclass(frozen=True)
class Rows:
    """A value of which a microbatch has a part: along ``dim``, of each of ``blocks`` equal blocks of it."""

    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Whole:
    """A value that is the same for every microbatch, computed as it is."""


@dataclass(frozen=True)
class Summed:
    """A value that is a sum over rows: that of all microbatches is the value."""


Part: TypeAlias = Rows | Whole | Summed
WHOLE, SUMMED = Whole(), Summed()


class Mixes(Exception):
    """An op whose results for a row depend on other rows, or of which it is not known."""


@dataclass(frozen=True, eq=False)
class Given:
    """An operand among an op's arguments.

    Attributes:
        index: among the op's operands.
        part: of it.
        shape: for all rows.
    """

    index: int
    part: Part
    shape: tuple[int, ...]


class OpForRows:
    """An op that is being made for a microbatch.

    Args:
        node: the op, for all rows.
        args: its positional arguments, with a :class:`Given` for each operand; a rule may replace sizes in it.
        unit: what a dim of rows is a multiple of.
        microbatches: how many parts the rows are cut into.

    Attributes:
        cuts: by index of an operand that is :class:`Whole`: how it is cut for a microbatch.
        target: what is called.
    """

    def __init__(self, node: Node, args: list[Any], unit: int, microbatches: int) -> None:
        self.node, self.args = node, args
        self.target: Any = node.target
        self.unit, self.microbatches = unit, microbatches
        self.cuts: dict[int, Rows] = {}
        self.shape: tuple[int, ...] = _shape(node.meta.get("val"))

    @property
    def operands(self) -> list[Given]:
        return list(_operands(self.args))

    def cut(self, given: Given, rows: Rows) -> None:
        """Cut an operand that is the same for all microbatches to one's rows."""
        if given.part != WHOLE or given.shape[rows.dim] % (self.unit * rows.blocks):
            raise Mixes(self.reason())
        self.cuts[given.index] = rows

    def resize(self, position: int, rows: Rows) -> None:
        """Make the shape at ``position`` among the arguments that of the result for a microbatch."""
        sizes = list(self.shape)
        sizes[rows.dim] //= self.microbatches
        self.args[position] = sizes

    def reason(self) -> str:
        return f"{op_name(self.node) or self.node.target} in a layer does not treat the rows of a batch one by one"


Rule = Callable[[OpForRows], Part | tuple[Part, ...]]


def part_of(op: OpForRows) -> Part | tuple[Part, ...]:
    """Where the rows of an op's results are; ``op`` becomes the op for a microbatch.

    Raises:
        Mixes: rows of one microbatch may depend on those of another.
    """
    if op.target is operator.getitem:
        return op.args[0].part[op.args[1]]
    if draws(op.target):
        return WHOLE if all(one.part == WHOLE for one in op.operands) else _mixes(op)
    parts = [one.part for one in op.operands]
    if all(part == WHOLE for part in parts):
        value = op.node.meta.get("val")
        return (WHOLE,) * len(value) if isinstance(value, tuple | list) else WHOLE
    name = op_name(op.node)
    rule = _RULES.get(name)
    if rule is None:
        pointwise = isinstance(op.target, torch._ops.OpOverload) and torch.Tag.pointwise in op.target.tags
        rule = _pointwise if pointwise else _mixes
    if SUMMED in parts:
        return _linear(op, name, parts)
    return rule(op)


def _mixes(op: OpForRows) -> Part:
    raise Mixes(op.reason())


# -- sums over rows ----------------------------------------------------------------------------------------------------------

# fmt: off
_SAME = ("alias", "detach", "clone", "_to_copy", "neg", "barrier", "split_rows", "to_host", "to_device", "lift_fresh_copy")
_MOVES = (
    *_SAME, "t", "transpose", "permute", "unsqueeze", "squeeze", "view", "_unsafe_view", "reshape", "expand", "slice", "select",
)
# fmt: on


def _linear(op: OpForRows, name: str, parts: Sequence[Part]) -> Part:
    """An op that gives the sum over rows of what it gives for each."""
    if len(parts) == 1 and name in (*_MOVES, "sum"):
        return SUMMED
    if name in ("mul", "div") and parts[0] == SUMMED and all(part == WHOLE for part in parts[1:]):
        return SUMMED
    if name == "mul" and parts == [WHOLE, SUMMED]:
        return SUMMED
    if name in ("add", "sub") and len(parts) == 2 and parts[0] == parts[1]:
        return SUMMED
    if name == "cat" and all(part == SUMMED for part in parts):
        return SUMMED
    raise Mixes(op.reason())


# -- by element --------------------------------------------------------------------------------------------------------------


def _pointwise(op: OpForRows) -> Part:
    return _broadcast(op, op.operands, op.shape)


def _broadcast(op: OpForRows, operands: Sequence[Given], shape: tuple[int, ...]) -> Rows:
    """Operands that are broadcast against each other to ``shape``."""
    places = {(_from_left(one, shape), one.part.blocks) for one in operands if isinstance(one.part, Rows)}
    if len(places) != 1:
        raise Mixes(op.reason())
    dim, blocks = places.pop()
    for one in operands:
        own = dim - len(shape) + len(one.shape)
        if one.part == WHOLE and own >= 0 and one.shape[own] != 1:
            op.cut(one, Rows(own, blocks))
    return Rows(dim, blocks)


def _from_left(given: Given, shape: tuple[int, ...]) -> int:
    assert isinstance(given.part, Rows)
    return given.part.dim + len(shape) - len(given.shape)


# -- moving dims -------------------------------------------------------------------------------------------------------------


def _first(op: OpForRows) -> tuple[Given, Rows]:
    """The first argument, whose rows the op moves; any other operand is an error."""
    given = op.args[0]
    if len(op.operands) != 1 or not isinstance(given.part, Rows):
        raise Mixes(op.reason())
    return given, given.part


def _view(op: OpForRows) -> Part:
    given, rows = _first(op)
    found = _in_shape(given.shape, rows, op.shape, op.unit)
    if found is None or isinstance(op.args[1], torch.dtype):
        raise Mixes(op.reason())
    op.resize(1, found)
    return found


def _in_shape(old: Sequence[int], rows: Rows, new: Sequence[int], unit: int) -> Rows | None:
    """Where the rows are after a view; None where they are no part of one dim."""
    outside = math.prod(old[: rows.dim]) * rows.blocks
    found = None
    for dim, size in enumerate(new):
        before = math.prod(new[:dim])
        if outside % before == 0 and size % (outside // before * unit) == 0:
            found = Rows(dim, outside // before)
    return found


def _squeeze(op: OpForRows) -> Part:
    op.target = torch.ops.aten.view.default  # a microbatch may have a dim of one more
    op.args[1:] = [list(op.shape)]
    return _view(op)


def _unsqueeze(op: OpForRows) -> Part:
    given, rows = _first(op)
    dim = op.args[1] % (len(given.shape) + 1)
    return Rows(rows.dim + (dim <= rows.dim), rows.blocks)


def _transpose(op: OpForRows) -> Part:
    given, rows = _first(op)
    rank = len(given.shape)
    a, b = (op.args[1] % rank, op.args[2] % rank) if len(op.args) > 2 else (0, rank - 1)  # t of a matrix
    return Rows({a: b, b: a}.get(rows.dim, rows.dim), rows.blocks)


def _permute(op: OpForRows) -> Part:
    given, rows = _first(op)
    return Rows([dim % len(given.shape) for dim in op.args[1]].index(rows.dim), rows.blocks)


def _expand(op: OpForRows) -> Part:
    given, rows = _first(op)
    found = Rows(_from_left(given, op.shape), rows.blocks)
    op.resize(1, found)
    return found


def _constant(op: OpForRows) -> Part:
    """An op whose results are all one number: no value of its operand is in them."""
    return WHOLE


def _repeat(op: OpForRows) -> Part:
    given, rows = _first(op)
    found = Rows(_from_left(given, op.shape), rows.blocks)
    return found if op.args[1][found.dim] == 1 else _mixes(op)


def _slice(op: OpForRows) -> Part:
    given, rows = _first(op)
    dim = _argument(op, 1, 0) % len(given.shape)
    if dim == rows.dim:
        if op.shape[dim] != given.shape[dim]:
            raise Mixes(op.reason())
        op.target, op.args[1:] = torch.ops.aten.alias.default, []
    return rows


def _select(op: OpForRows) -> Part:
    given, rows = _first(op)
    dim = op.args[1] % len(given.shape)
    return _mixes(op) if dim == rows.dim else Rows(rows.dim - (dim < rows.dim), rows.blocks)


def _split(op: OpForRows) -> tuple[Part, ...]:
    _, rows = _first(op)
    dim = _argument(op, 2, 0) % len(op.args[0].shape)
    if dim == rows.dim:
        raise Mixes(op.reason())
    return (rows,) * len(op.node.meta["val"])


def _cat(op: OpForRows) -> Part:
    tensors: list[Given] = op.args[0]
    dim = _argument(op, 1, 0) % len(op.shape)
    rows = next(one.part for one in tensors if isinstance(one.part, Rows))
    if dim != rows.dim:
        for one in tensors:
            if one.part == WHOLE:
                op.cut(one, rows)
            elif one.part != rows:
                raise Mixes(op.reason())
        return rows
    if any(one.part != Rows(dim) or one.shape != tensors[0].shape for one in tensors):
        raise Mixes(op.reason())
    return Rows(dim, len(tensors))


def _pad(op: OpForRows) -> Part:
    given, rows = _first(op)
    padded = [len(given.shape) - 1 - i // 2 for i, size in enumerate(op.args[1]) if size]
    return _mixes(op) if rows.dim in padded else rows


def _slice_scatter(op: OpForRows) -> Part:
    found = _broadcast(op, op.operands, op.shape)
    return _mixes(op) if _argument(op, 2, 0) % len(op.shape) == found.dim else found


# -- along dims --------------------------------------------------------------------------------------------------------------


def _along(position: int) -> Rule:
    """An op that computes along the dim at ``position`` among its arguments, and leaves shapes as they are."""

    def rule(op: OpForRows) -> Part | tuple[Part, ...]:
        found = _broadcast(op, op.operands, op.operands[0].shape)
        if _argument(op, position, -1) % len(op.operands[0].shape) == found.dim:
            raise Mixes(op.reason())
        value = op.node.meta["val"]
        return (found,) * len(value) if isinstance(value, tuple | list) else found

    return rule


def _reduced(op: OpForRows) -> Part | tuple[Part, ...]:
    """An op that computes a number of each of the slices along the dims that come second among its arguments."""
    given, rows = _first(op)
    rank = len(given.shape)
    dims = _argument(op, 1, None)
    dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    reduced = {dim % rank for dim in dims}
    value = op.node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    if rows.dim in reduced:
        return SUMMED if op_name(op.node) == "sum" else _mixes(op)
    kept = first.ndim == rank
    found = rows if kept else Rows(rows.dim - sum(dim < rows.dim for dim in reduced), rows.blocks)
    return (found,) * len(value) if isinstance(value, tuple | list) else found


# -- products ----------------------------------------------------------------------------------------------------------------


def _product(op: OpForRows) -> Part:
    return _product_of(op, op.args[0], op.args[1])


def _product_of(op: OpForRows, a: Given, b: Given) -> Part:
    """(…, n, k) times (…, k, m), of two or three dims each."""
    row, inner = len(a.shape) - 2, len(a.shape) - 1
    of_a, of_b = (one.part if isinstance(one.part, Rows) else None for one in (a, b))
    contracted = (of_a is not None and of_a.dim == inner) or (of_b is not None and of_b.dim == row)
    batched = inner == 2 and ((of_a is not None and of_a.dim == 0) or (of_b is not None and of_b.dim == 0))
    if contracted or batched:
        places = (inner, row) if contracted else (0, 0)
        blocks = (of_a or of_b).blocks  # pyright: ignore[reportOptionalMemberAccess]
        for one, part, dim in ((a, of_a, places[0]), (b, of_b, places[1])):
            if part is None:
                op.cut(one, Rows(dim, blocks))
            elif part != Rows(dim, blocks):
                raise Mixes(op.reason())
        return SUMMED if contracted else Rows(0, blocks)
    if of_a is not None and of_b is None:
        return of_a
    if of_b is not None and of_a is None:
        return of_b
    raise Mixes(op.reason())


def _added_product(op: OpForRows) -> Part:
    found = _product_of(op, op.args[1], op.args[2])
    added: Given = op.args[0]
    if not isinstance(found, Rows):
        raise Mixes(op.reason())
    stands_for = Given(-1, found, op.shape)
    return _broadcast(op, [added, stands_for], op.shape)


# -- norms, attention, tables ------------------------------------------------------------------------------------------------


def _norm(op: OpForRows) -> tuple[Part, ...]:
    given: Given = op.args[0]
    if not isinstance(given.part, Rows) or given.part.dim >= len(given.shape) - len(op.args[1]):
        raise Mixes(op.reason())
    if any(one.part != WHOLE for one in op.operands[1:]):
        raise Mixes(op.reason())
    return (given.part,) * 3


def _norm_backward(op: OpForRows) -> tuple[Part, ...]:
    grad, given, sizes, mean, deviation = op.args[:5]
    found = _broadcast(op, [grad, given, mean, deviation], given.shape)
    if found.dim >= len(given.shape) - len(sizes):
        raise Mixes(op.reason())
    return found, SUMMED, SUMMED


def _attention(op: OpForRows) -> tuple[Part, ...]:
    """Ops on (B, H, L, E), with masks that are broadcast against (B, H, L, S), and segments (B, L) or (1, L)."""
    if len(op.operands[0].shape) < 4:
        raise Mixes(op.reason())
    for one in op.operands:
        if one.part == WHOLE and (len(one.shape) in (2, 4)) and one.shape[0] == op.operands[0].shape[0] != 1:
            if len(one.shape) == 2 and not op_name(op.node).startswith("banded"):
                continue  # a mask (L, S) of all rows
            op.cut(one, Rows(0))
        elif one.part not in (WHOLE, Rows(0)):
            raise Mixes(op.reason())
    return (Rows(0),) * len(op.node.meta["val"])


def _experts(op: OpForRows) -> Part:
    """Tokens (T, D), the experts (T, K) that each has chosen and their weights; then the experts' own weights."""
    tokens, own = op.operands[:-2], op.operands[-2:]
    if any(one.part != WHOLE for one in own):
        raise Mixes(op.reason())
    rows = next(one.part for one in tokens if isinstance(one.part, Rows))
    for one in tokens:
        if one.part == WHOLE:
            op.cut(one, rows)
        elif one.part != rows:
            raise Mixes(op.reason())
    return rows


def _experts_backward(op: OpForRows) -> tuple[Part, ...]:
    rows = _experts(op)
    return rows, rows, SUMMED, SUMMED


def _lookup(op: OpForRows) -> Part:
    table, index = op.args[0], op.args[1]
    return index.part if table.part == WHOLE else _mixes(op)


def _argument(op: OpForRows, position: int, default: Any) -> Any:
    return op.args[position] if len(op.args) > position else default


def _operands(value: Any) -> list[Given]:
    if isinstance(value, Given):
        return [value]
    if isinstance(value, tuple | list):
        return [one for element in value for one in _operands(element)]
    return []


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


# fmt: off
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_SAME, "full_like", "copy"), _pointwise),
    **dict.fromkeys(("view", "_unsafe_view"), _view),
    **dict.fromkeys((f"new_{kind}" for kind in ("empty", "empty_strided", "full", "ones", "zeros")), _constant),
    **dict.fromkeys(("t", "transpose"), _transpose),
    **dict.fromkeys(("sum", "mean", "var", "var_mean"), _reduced),
    **dict.fromkeys(("amax", "amin", "any", "argmax", "argmin"), _reduced),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "gather"), _along(1)),
    **dict.fromkeys(("mm", "bmm"), _product),
    **dict.fromkeys((f"{kind}attention{end}" for kind in ("", "banded_") for end in ("", "_backward")), _attention),
    "squeeze": _squeeze, "unsqueeze": _unsqueeze, "permute": _permute, "expand": _expand, "repeat": _repeat, "slice": _slice,
    "select": _select, "cat": _cat, "constant_pad_nd": _pad, "slice_scatter": _slice_scatter, "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm_backward, "embedding": _lookup, "split_with_sizes": _split, "addmm": _added_product,
    "experts": _experts, "experts_backward": _experts_backward, "topk": _along(2), "scatter": _along(1),
    "scatter_add": _along(1),
}
# fmt: on
