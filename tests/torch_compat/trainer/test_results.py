"""Metrics of a loop: what programs logged and what hooks and eager steps logged, in order."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.core.logging import LogOptions
from torch_compat.run.batches import LoggedSize, flatten_batch
from torch_compat.step.effects.logged import LogEntry
from torch_compat.trainer.results import Results
from torch_compat.utilities.exceptions import MisconfigurationException


def test_eager_steps_log_after_the_programs_before_them() -> None:
    results = Results(training=True, sync=lambda value, reduction: value, look=lambda: None)
    options = LogOptions(on_step=True, on_epoch=True)
    results.push([LogEntry("training_step", "loss", options, 0)], np.asarray([1.0], np.float32), LoggedSize(4))
    results.batch_size = LoggedSize(4)
    results.log("training_step", "loss", torch.tensor(3.0), options)  # the step could not be compiled for this batch
    assert results.metrics(on_step=True).logged["loss_step"] == 3.0
    assert results.metrics(on_step=False).logged["loss_epoch"] == 2.0


X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("batch", "hidden"),
    [
        (types.SimpleNamespace(x=X), True),
        ([types.SimpleNamespace(x=X)], True),
        ({"x": types.SimpleNamespace(x=X), "y": X}, False),
        ([[X]], False),
        ([1, "a"], False),
    ],
)
def test_the_size_of_a_batch_in_objects_of_own_classes(batch: Any, hidden: bool) -> None:
    """As in stock, it is asked for where it is the weight of a value."""
    leaves, spec = flatten_batch(batch)
    size = LoggedSize.of([leaf.shape for leaf in leaves], spec)
    assert size.is_hidden is hidden
    results = Results(training=True, sync=lambda value, reduction: value, look=lambda: None)
    values = np.asarray([1.0], np.float32)
    results.push([LogEntry("training_step", "step", LogOptions(on_step=True), 0)], values, size)
    results.push([LogEntry("training_step", "sized", LogOptions(on_epoch=True, batch_size=4), 0)], values, size)
    epoch = [LogEntry("training_step", "epoch", LogOptions(on_epoch=True), 0)]
    if not hidden:
        results.push(epoch, values, size)
        return
    with pytest.raises(MisconfigurationException, match=r"We could not infer the batch_size from the batch.*batch_size="):
        results.push(epoch, values, size)
