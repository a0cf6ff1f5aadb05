"""``x[mask]`` of a run on fake tensors, as ``x`` and the mask: no size depends on values.

What most steps do with selected rows goes row by row and ends in a sum or mean (``loss[mask].mean()``), or in a scatter. So all
rows are kept, and a sum leaves out those that are not selected. Where a function needs the rows themselves (``torch.sort``), or
Python asks how many there are, they are taken out (:meth:`MaskedRows.exact`), as if the mask had been used there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch

from xlatrain.bridge.capture.cut import UnknownValueError, cut_to
from xlatrain.bridge.errors import BridgeError

take: Callable[[torch.Tensor, Any], torch.Tensor] = torch.Tensor.__getitem__
"""``x[index]`` as torch does it."""

_ASSIGN: Any = torch.Tensor.__setitem__

Rule = Callable[..., Any]
"""``(function, args, kwargs) -> `` its result; NotImplemented where it needs the rows themselves."""

RULES: dict[Any, Rule] = {}
"""By torch function: what it does without them."""


class LaterNumber(Protocol):
    """A number that Python asked a tensor for, which only the running step may know."""

    def stays_a_number(self) -> bool:
        """Whether only the running step knows it."""
        ...

    def as_count(self) -> Any:
        """The number as one that is often 0."""
        ...


class MaskedRows(torch.Tensor):
    """The selected rows of a tensor; user code takes it for these.

    Attributes:
        rows: all rows, along ``dim``. Those that are not selected have the values of one that is: whatever is computed of them is
            finite where it is for the selected ones, and so are gradients.
        valid: a bool tensor (rows,): those that are selected.
        axis: the dim of the rows.
    """

    _xlatrain_kind = torch.Tensor
    rows: torch.Tensor
    valid: torch.Tensor
    axis: int
    _exact: tuple[int, torch.Tensor] | None

    @staticmethod
    def of(rows: torch.Tensor, valid: torch.Tensor, axis: int = 0) -> MaskedRows:
        made = torch.Tensor._make_wrapper_subclass(MaskedRows, (0,), dtype=rows.dtype, device=rows.device)
        made.rows, made.valid, made.axis, made._exact = rows, valid, axis, None
        return made

    @staticmethod
    def of_mask(x: torch.Tensor, mask: torch.Tensor, axis: int = 0) -> MaskedRows:
        """``x[mask]``, or ``x[:, mask]`` and so on.

        Args:
            x: its dims from ``axis`` on have the shape of the mask.
        """
        rows = x.flatten(axis, axis + mask.ndim - 1)
        valid = valid_of(mask)
        with torch.no_grad():
            first = valid.to(torch.int32).argmax().reshape(1)
            one = rows.detach().index_select(axis, first)
        return MaskedRows.of(torch.where(beside(valid, rows, axis), rows, one), valid, axis)

    def exact(self) -> torch.Tensor:
        """The selected rows alone: their number is a value that the step asks for (:mod:`xlatrain.bridge.capture.sized_ops`)."""
        version = self.rows._version
        if self._exact is None or self._exact[0] != version:
            self._exact = version, take(self.rows, self._index())
        return self._exact[1]

    def count(self) -> Any:
        """The number of selected rows where only the running step knows it, a value that comes later; else NotImplemented."""
        found = getattr(self.valid, "_count", None)
        if found is None:
            with contextlib.suppress(BridgeError):
                found = self.valid.sum().item()
            count = found.as_count() if _comes_later(found) and found.stays_a_number() else NotImplemented
            found = self.valid._count = count  # pyright: ignore[reportAttributeAccessIssue]
        return found

    def _index(self) -> tuple[Any, ...]:
        return (*[slice(None)] * self.axis, self.valid)

    def like(self, rows: torch.Tensor, axis: int | None = None) -> MaskedRows:
        """Rows with the same mask."""
        return MaskedRows.of(rows, self.valid, self.axis if axis is None else axis)

    def filled(self, value: Any) -> torch.Tensor:
        """All rows, with ``value`` in those that are not selected."""
        return torch.where(beside(self.valid, self.rows, self.axis), self.rows, value)

    def is_beside(self, other: MaskedRows) -> bool:
        """Whether both are selected by the same mask."""
        return self.valid is other.valid or _computes_same(self.valid, other.valid)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        items = {torch.Tensor.__getitem__: take, torch.Tensor.__setitem__: _ASSIGN}  # what torch finds there may be a patch
        rule = RULES.get(items.get(func, func))
        if rule is not None and (found := _by(rule, func, args, kwargs)) is not NotImplemented:
            return found
        name = getattr(func, "__name__", "")
        if name in _VALUES:
            return getattr(exactly(args[0]), name)(*exactly(args[1:]), **exactly(kwargs))  # what a capture puts in their place
        if _writes(name) and type(args[0]) is MaskedRows:
            return args[0]._write(func, *exactly(args[1:]), **exactly(kwargs))
        return func(*exactly(args), **exactly(kwargs))

    def _write(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Change the selected rows in place, in what all views of them see."""
        exact = self.exact()
        made = func(exact, *args, **kwargs)
        torch.Tensor.__setitem__(self.rows, self._index(), exact)
        return self if made is exact else made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} met rows of a mask behind torch's functions")


_VALUES = frozenset(
    (
        *("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__", "__contains__"),
        *("__format__", "__repr__", "__str__"),
    )
)


def _comes_later(value: object) -> TypeGuard[LaterNumber]:
    return hasattr(type(value), "as_count")


def _by(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result by a rule; NotImplemented also where it meets arguments that it does not know: torch has the errors."""
    try:
        return rule(func, args, kwargs)
    except BridgeError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError):
        return NotImplemented


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _ASK)


_ASK = frozenset(("__invert__", "__index__", "__int__", "__iter__"))


def exactly(value: Any) -> Any:
    """``value`` with the selected rows alone in place of all :class:`MaskedRows` in it."""
    kind = type(value)
    if kind is MaskedRows:
        return value.exact()
    if kind is list or kind is tuple:
        return kind(map(exactly, value))
    if kind is dict:
        return {key: exactly(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(kind, map(exactly, value))
    return value


def beside(valid: torch.Tensor, rows: torch.Tensor, axis: int) -> torch.Tensor:
    """``valid`` with dims for all of those of ``rows``."""
    return valid.reshape(*[1] * axis, -1, *[1] * (rows.ndim - axis - 1))


def derived(valid: torch.Tensor, how: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A mask made of another: the same object for the same ``how``, which tells rows that are selected alike."""
    made: dict[Any, Any] | None = getattr(valid, "_xlatrain_derived", None)
    if made is None:
        made = valid._xlatrain_derived = {}  # pyright: ignore[reportAttributeAccessIssue]
    key = tuple(id(one) if isinstance(one, torch.Tensor) else one for one in how)
    if key not in made:
        made[key] = make(), how  # an id must not be used twice
    return made[key][0]


def valid_of(mask: torch.Tensor) -> torch.Tensor:
    """A flat copy of a mask as it is now; the same one as long as nobody writes to the mask."""
    made: tuple[int, torch.Tensor] | None = getattr(mask, "_xlatrain_valid", None)
    if made is None or made[0] != mask._version:
        made = mask._version, mask.detach().reshape(-1).clone()
        mask._xlatrain_valid = made  # pyright: ignore[reportAttributeAccessIssue]
    return made[1]


def _computes_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    try:
        return cut_to(left).text == cut_to(right).text
    except UnknownValueError:
        return False
