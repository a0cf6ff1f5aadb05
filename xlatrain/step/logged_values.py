"""Logged values of a training loop: arrays of a program with what is to be done with them, and their reductions over an epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

_OPTIONS = frozenset({"on_step", "on_epoch", "reduce_fx", "batch_size", "logger"})
_OF_THE_TRAINER = frozenset({"prog_bar", "sync_dist", "rank_zero_only", "add_dataloader_idx"})
_REDUCTIONS = {"mean": "mean", "sum": "sum", "min": "min", "max": "max", "amin": "min", "amax": "max"}


@dataclasses.dataclass(frozen=True)
class LogOptions:
    """The options of ``self.log`` that count here.

    Attributes:
        name: the key.
        on_step: whether the value of a step is logged.
        on_epoch: whether the reduction over an epoch is logged.
        reduction: ``"mean"`` (weighted by rows), ``"sum"``, ``"min"`` or ``"max"``.
        rows: the weight of a mean; None: the rows of the batch.
        is_told: whether ``log`` gets the values, too.
    """

    name: str
    on_step: bool
    on_epoch: bool
    reduction: str
    rows: int | None
    is_told: bool = True

    @property
    def step_name(self) -> str:
        """The name of a step's value."""
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """The name of an epoch's value."""
        return f"{self.name}_epoch" if self.on_step else self.name


def log_options(name: str, given: Mapping[str, Any], *, on_step: bool) -> LogOptions:
    """The options of one call of ``self.log``, where ``on_step``, else ``on_epoch``, is the default.

    Raises:
        TypeError: an option that only the Trainer has, by name.
        ValueError: a reduction that is not known.
    """
    if unknown := sorted(given.keys() - _OPTIONS - _OF_THE_TRAINER):
        raise TypeError(
            f"self.log({name!r}, {unknown[0]}=…): xlatrain.fit knows {', '.join(sorted(_OPTIONS))}; "
            "torch_compat.Trainer has the others"
        )
    reduce_fx = given.get("reduce_fx", "mean")
    reduction = _REDUCTIONS.get(reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", ""))
    if reduction is None:
        raise ValueError(f"self.log({name!r}, reduce_fx={reduce_fx!r}): expected one of {', '.join(dict.fromkeys(_REDUCTIONS))}")
    step, epoch = given.get("on_step"), given.get("on_epoch")
    return LogOptions(
        name,
        on_step if step is None else step,
        not on_step if epoch is None else epoch,
        reduction,
        given.get("batch_size"),
        is_told=given.get("logger") is not False,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoggedArrays:
    """The logged arrays of one step: a result of its program, which keeps the options beside them.

    Attributes:
        values: scalars.
        options: one for each of them; static.
    """

    values: tuple[Any, ...]
    options: tuple[LogOptions, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, logged: Iterable[tuple[str, Any, Mapping[str, Any]]], *, on_step: bool) -> LoggedArrays:
        """The arrays that a traced step logged.

        Raises:
            ValueError: a value has more than one element.
        """
        values, options = [], []
        for name, value, given in logged:
            array = jnp.asarray(value)
            if array.size != 1:
                raise ValueError(f"self.log({name!r}): the value has the shape {list(array.shape)}; expected one element")
            values.append(array.reshape(()))
            options.append(log_options(name, given, on_step=on_step))
        return cls(tuple(values), tuple(options))


class EpochValues:
    """Reductions of logged values over the steps of an epoch, in float64.

    Args:
        saved: of :meth:`saved`, where an epoch goes on.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self._sums: dict[str, list[Any]] = {name: list(entry) for name, entry in (saved or {}).items()}

    def add(self, options: LogOptions, value: float, rows: int) -> None:
        """Take in the value of one step, whose batch has so many rows."""
        weight = rows if options.rows is None else options.rows
        entry = self._sums.get(options.epoch_name)
        if options.reduction == "mean":
            total, weights = (0.0, 0) if entry is None else entry[1:]
            self._sums[options.epoch_name] = ["mean", total + value * weight, weights + weight]
        else:
            combine = {"sum": lambda a, b: a + b, "min": min, "max": max}[options.reduction]
            self._sums[options.epoch_name] = [options.reduction, value if entry is None else combine(entry[1], value), 1]

    def values(self) -> dict[str, float]:
        """The reductions so far, by name."""
        return {name: total / weight for name, (_, total, weight) in self._sums.items()}

    def saved(self) -> dict[str, Any]:
        """The sums so far, as values that JSON has."""
        return dict(self._sums)
