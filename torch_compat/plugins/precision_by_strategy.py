"""Precision plugins that stock names after strategies. API: ``lightning.pytorch.plugins.FSDPPrecision``, ``XLAPrecision``.

Here XLA shards and computes whatever the dtypes: each is the plugin of :mod:`torch_compat.plugins.precision` with its dtypes.
"""

from __future__ import annotations

import functools
from typing import Any

from torch_compat.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch_compat.utilities.imports import _XLA_AVAILABLE
from torch_compat.utilities.rank_zero import rank_zero_deprecation

_KINDS: dict[str, type[Precision]] = {
    "32-true": Precision,
    "16-true": HalfPrecision,
    "bf16-true": HalfPrecision,
    "16-mixed": MixedPrecision,
    "bf16-mixed": MixedPrecision,
}


class _ByName(Precision):
    """The base of plugins named after strategies: an object is also one of the plugin of its dtypes, for ``isinstance``."""

    def __new__(cls, precision: str = "32-true", *args: Any, **kwargs: Any) -> Any:
        kind = _KINDS.get(precision, Precision)
        return object.__new__(cls if issubclass(cls, kind) else _joined(cls, kind))


@functools.cache
def _joined(cls: type, kind: type) -> type:
    return type(cls.__name__, (cls, kind), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class FSDPPrecision(_ByName):
    """Precision of a sharded model.

    Args:
        precision: ``"32-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"`` or ``"bf16-mixed"``.
        scaler: loss scaling for ``"16-mixed"``, an ``xlatrain.step.loss_scale.LossScaler``.

    Raises:
        ValueError: another precision, or a scaler for one that needs none.
    """

    def __init__(self, precision: str, scaler: Any | None = None) -> None:
        if scaler is not None and precision != "16-mixed":
            raise ValueError(f"`precision={precision!r}` does not use a scaler, found {scaler}: leave it out.")
        if precision not in _KINDS:
            raise ValueError(f"`precision={precision!r}` is not supported in FSDP; choose one of {', '.join(map(repr, _KINDS))}.")
        if _KINDS[precision] is MixedPrecision:
            MixedPrecision.__init__(self, precision, scaler=scaler)  # pyright: ignore[reportArgumentType]  it is one
        self.precision = precision


class FSDPMixedPrecisionPlugin(FSDPPrecision):
    """Stock's deprecated name for :class:`FSDPPrecision`; ``device`` is looked at by neither."""

    def __init__(self, precision: str, device: str, scaler: Any | None = None) -> None:
        rank_zero_deprecation(
            f"The `{type(self).__name__}` is deprecated. Use `lightning.pytorch.plugins.precision.FSDPPrecision` instead."
        )
        super().__init__(precision, scaler)


class XLAPrecision(_ByName):
    """Precision of a model on torch-xla; with torch_xla installed only, as in stock.

    Args:
        precision: ``"32-true"``, ``"16-true"`` or ``"bf16-true"``.

    Raises:
        ModuleNotFoundError: there is no torch_xla. ``Trainer(precision=…)`` does the same for JAX.
        ValueError: another precision.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if not _XLA_AVAILABLE:
            raise ModuleNotFoundError(f"{_XLA_AVAILABLE}; for TPUs through JAX use Trainer(precision={precision!r})")
        if not precision.endswith("-true") or precision not in _KINDS:
            raise ValueError(f"`precision={precision!r}` is not supported in XLA; choose '32-true', '16-true' or 'bf16-true'.")
        self.precision = precision
