"""Metrics of a loop: what programs logged and what hooks and eager steps logged, in order."""

from __future__ import annotations

import numpy as np
import torch

from torch_compat.core.logging import LogOptions
from torch_compat.run.batches import LoggedSize
from torch_compat.step.effects.logged import LogEntry
from torch_compat.trainer.results import Results


def test_eager_steps_log_after_the_programs_before_them() -> None:
    results = Results(training=True, sync=lambda value, reduction: value, look=lambda: None)
    options = LogOptions(on_step=True, on_epoch=True)
    results.push([LogEntry("training_step", "loss", options, 0)], np.asarray([1.0], np.float32), LoggedSize(4))
    results.batch_size = LoggedSize(4)
    results.log("training_step", "loss", torch.tensor(3.0), options)  # the step could not be compiled for this batch
    assert results.metrics(on_step=True).log["loss_step"] == 3.0
    assert results.metrics(on_step=False).log["loss_epoch"] == 2.0
