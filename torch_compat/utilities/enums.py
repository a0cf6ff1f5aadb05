"""String enumerations (``lightning.pytorch.utilities.enums``)."""

from __future__ import annotations

from lightning_utilities.core.enums import StrEnum

LightningEnum = StrEnum
"""A string enumeration that compares without case."""


class GradClipAlgorithmType(StrEnum):
    """The way of clipping gradients: each value, or the norm over all of them."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Whether ``val`` names an algorithm."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """The names, in the order of their definition."""
        return [algorithm.value for algorithm in GradClipAlgorithmType]
