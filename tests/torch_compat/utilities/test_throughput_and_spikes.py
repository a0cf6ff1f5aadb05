"""Throughput, SpikeDetection and EMAWeightAveraging.should_update; the expected values are Lightning 2.6.6's."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_compat.accelerators.throughput import Throughput
from torch_compat.callbacks import EMAWeightAveraging, SpikeDetection, StochasticWeightAveraging, WeightAveraging
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.spike import TrainingSpikeException
from xlatrain.xla.peak_flops import peak_flops


def test_throughput_of_four_devices() -> None:
    throughput = Throughput(available_flops=100.0, world_size=4, window_size=3)
    for i in range(1, 5):
        throughput.update(time=i * 0.5, batches=i, samples=i * 4, lengths=i * 40, flops=10)
    assert throughput.compute() == {
        "time": 2.0, "batches": 4, "samples": 16, "lengths": 160, "device/batches_per_sec": 2.0, "device/samples_per_sec": 8.0,
        "batches_per_sec": 8.0, "samples_per_sec": 32.0, "device/items_per_sec": 80.0, "items_per_sec": 320.0,
        "flops_per_sec": 80.0, "device/flops_per_sec": 20.0, "device/mfu": 0.2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"Expected the value to increase, last: 2\.0, current: 1\.0"):
        throughput.update(time=1.0, batches=5, samples=20)
    throughput.reset()
    throughput.update(time=1.0, batches=1, samples=4)
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 4}
    with pytest.raises(ValueError, match="greater or equal than samples"):
        throughput.update(time=2.0, batches=2, samples=8, lengths=7)


def test_peak_flops() -> None:
    def device(kind: str) -> Any:
        return types.SimpleNamespace(device_kind=kind)

    assert peak_flops(device("TPU v5 lite"), "bfloat16") == 197e12
    assert peak_flops(device("TPU v5p"), "bfloat16") == 459e12
    assert peak_flops(device("cpu"), "bfloat16") is None
    assert peak_flops(device("TPU v4"), "float32") is None
    assert peak_flops(device("TPU v5 lite"), "int8") == 2 * 197e12 and peak_flops(device("TPU v4"), "int8") == 275e12
    assert peak_flops(device("TPU7x"), "float8_e4m3fn") == 2 * 1153.5e12
    assert peak_flops(device("TPU v5 lite"), "float8_e4m3fn") == 197e12, "which it multiplies in bfloat16"


_TRAINER: Any = types.SimpleNamespace(
    global_rank=0,
    strategy=types.SimpleNamespace(barrier=lambda: None, reduce_boolean_decision=lambda decision, all: decision),
)


@pytest.mark.parametrize(
    ("losses", "options", "spike"),
    [
        ([1.0, 1.1, 1.0, 5.0], {}, 3),
        ([1.0, 1.1, 1.0, float("nan")], {}, 3),
        ([1.0, float("nan"), 1.0], {"finite_only": False}, None),
        ([1.0, float("nan"), 1.0, 9.0], {"finite_only": False}, 3),
        ([1.0, 2.0, 3.2, 20.0], {"atol": 5.0, "rtol": None}, 3),
        ([1.0, 2.0, 0.1, -20.0], {"mode": "max"}, 3),
        ([1.0, 50.0, 100.0], {"warmup": 2}, 2),
        ([float("nan"), 1.0, 1.0], {}, None),
    ],
)
def test_spikes(losses: list[float], options: dict[str, Any], spike: int | None, tmp_path: Path) -> None:
    callback = SpikeDetection(exclude_batches_path=tmp_path / "bad" / "batches.json", **options)
    found = None
    for index, loss in enumerate(losses):
        try:
            callback.on_train_batch_end(_TRAINER, None, {"loss": torch.tensor(loss)}, None, index)
        except TrainingSpikeException as error:
            found = error.batch_idx
            break
    assert found == spike
    if spike is not None:
        assert json.loads((tmp_path / "bad" / "batches.json").read_text()) == [spike - 1, spike]
    again = SpikeDetection()
    again.load_state_dict(callback.state_dict())
    assert again.state_dict() == callback.state_dict() or spike is None  # NaN differs from itself


def test_when_a_moving_average_is_updated() -> None:
    callback = EMAWeightAveraging(update_every_n_steps=3, update_starting_at_step=4, update_starting_at_epoch=2)
    assert [step for step in range(10) if callback.should_update(step_idx=step)] == [6, 9]
    assert [epoch for epoch in range(4) if callback.should_update(epoch_idx=epoch)] == [2, 3]
    assert not any(EMAWeightAveraging(update_every_n_steps=0).should_update(step_idx=step) for step in range(3))


def test_wrong_arguments_of_averaging_callbacks_are_named() -> None:
    with pytest.raises(TypeError, match=r"\['decay'\].*avg_fn"):
        WeightAveraging(decay=0.9)
    with pytest.raises(AssertionError, match="Only one of avg_fn and multi_avg_fn"):
        WeightAveraging(avg_fn=lambda a, b, n: a, multi_avg_fn=lambda a, b, n: None)
    with pytest.raises(RuntimeError, match="device"):
        WeightAveraging(device="abacus")
    for start in (0, 1.5, -0.1, "1"):
        with pytest.raises(MisconfigurationException, match="swa_epoch_start"):
            StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=start)
    for rates in (0.0, 1, [0.1, -0.1], [1]):
        with pytest.raises(MisconfigurationException, match="swa_lrs"):
            StochasticWeightAveraging(swa_lrs=rates)
