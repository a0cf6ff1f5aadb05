"""The state that a validation changes but does not own: restored where a preemption cuts it short, since it is then run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_compat.trainer import metric_states
from torch_compat.trainer.data import host_random, in_flight

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class BeforeValidation:
    """The state of random streams, validation loaders and metrics at the time of the call."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._streams = host_random.streams()
        self._loaders = in_flight.loaders_between(trainer.validate_loop.source.combined)
        self._metrics = metric_states.states(trainer.lightning_module)
        self._steps = dict(trainer.validate_loop.step_counts)

    def restore(self) -> None:
        """Restore the state."""
        loop = self._trainer.validate_loop
        in_flight.resume_loaders(loop.source.combined, self._loaders, "val_dataloader")
        host_random.set_streams(self._streams)
        metric_states.load(self._trainer.lightning_module, self._metrics)
        loop.step_counts.clear()
        loop.step_counts.update(self._steps)
