"""The host values of a step: what the host knows of it before its program runs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from xlatrain.bridge.errors import CaptureError, user_line

if TYPE_CHECKING:
    from torch_compat.step.host.assumptions import Assumptions
    from torch_compat.step.host.batch_values import BatchValues

Readers = dict[str, Callable[[], Any]]
"""Where numbers that the step's Python may read are found: text (``optimizers[0].param_groups[0]['lr']``) → reader."""


class Counters(Protocol):
    """Counters of loops."""

    def get(self, name: str) -> Callable[[], Any] | None: ...


class HostNumbers(dict[str, Any]):
    """The loop's counters in one step, and the numbers of ``readers``, which are read when they are asked for.

    Args:
        counters: numbers of this step.
        readers: of what the step itself may change.
        unchanged: gives readers of what does not change before the step is over.
    """

    def __init__(self, counters: Mapping[str, Any], readers: Readers | None = None, unchanged: Counters | None = None) -> None:
        super().__init__(counters)
        self._readers = {} if readers is None else readers  # to which a capture adds
        self._unchanged: Counters | Readers = unchanged or {}

    def __missing__(self, name: str) -> Any:
        reader = self._readers.get(name) or self._unchanged.get(name)
        if reader is None:
            where = user_line(traceback.extract_stack()) or "training_step"
            raise CaptureError(
                f"{where}\n  cannot be captured: the step's Python depends on {name.partition(' after ')[0]}, which it changed "
                "itself before. A compiled step can compute with such a number or log it, but not branch on it or format it.\n"
                "  Fix: read it before it is changed, or in a hook outside of the step."
            )
        return reader()

    def keep(self) -> None:
        """Read everything now: from here on the step itself may change it."""
        for name, reader in self._readers.items():
            if name not in self:
                self[name] = reader()


@dataclass
class HostValues:
    """The host values of one step.

    Attributes:
        numbers: by the step's name for each: counters, attributes and options that are inputs, what was drawn at random.
        others: the leaves of the batch that are no tensors.
        batch: the tensors of the batch as the host has them; None where its values are not to be had.
        assumptions: the outcomes of the step that are known or guessed; None where it may not be captured for outcomes.
        take_back: takes back the random draws that were made for the program that is about to run, where they may have to be.
        drawn: numbers that torch has drawn for it, by the number of the draw, where a second program needs the same.
    """

    numbers: HostNumbers
    others: Sequence[Any] = ()
    batch: BatchValues | None = None
    assumptions: Assumptions | None = None
    take_back: Callable[[], None] | None = None
    drawn: dict[int, torch.Tensor] | None = None

    def take_back_too(self, take_back: Callable[[], None]) -> None:
        """Let random draws be taken back besides those that are."""
        before = self.take_back

        def both() -> None:
            take_back()
            if before is not None:
                before()

        self.take_back = both

    def give_back(self) -> None:
        """The program for which random draws were made is not the one that counts, or there is none: nothing has been drawn."""
        if self.take_back is not None:
            self.take_back()
        self.take_back = None


Expression = Callable[[HostValues], Any]
