"""Eager steps on another device than the host's CPU: what is generic about it; no GPU takes part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.scripted import results_of
from torch_compat.step.eager import device as eager_device
from torch_compat.step.eager.fallback import must_fall_back
from torch_compat.trainer.devices import find_devices
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return results_of(Path(__file__).with_name("eager_on_lazy.py"), "")


@pytest.mark.slow
def test_a_run_that_falls_back_gives_the_numbers_of_the_host(runs: dict[str, Any]) -> None:
    found, host = runs["lazy"], runs["host"]
    assert found["executor"] == "EagerSteps"
    for values in ("weights", "predictions"):
        np.testing.assert_allclose(found[values], host[values], rtol=1e-4, atol=1e-5)
    assert found["logged"].keys() == host["logged"].keys() == {"loss", "loss_step", "loss_epoch", "val_loss", "accuracy"}
    assert list(found["logged"].values()) == pytest.approx(list(host["logged"].values()), rel=1e-4)


@pytest.mark.slow
def test_batches_and_parameters_are_on_the_device_during_the_run_only(runs: dict[str, Any]) -> None:
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_start")
    assert set(runs["lazy"]["seen"]) == {f"{hook}: {device}" for hook in hooks for device in ("cpu", "lazy")}
    for run in runs.values():
        assert run["at the end"] == ["cpu"]
        assert run["same parameters"]


def test_gpus_that_only_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert jax.devices()[0].platform == "cpu"  # started, with what JAX_PLATFORMS says
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", None)
    try:
        with pytest.raises(MisconfigurationException, match=r"sees 2 GPU\(s\), JAX does not, .*pip install 'jax\[cuda13\]'"):
            find_devices(None, "auto", 1)
        assert find_devices("cpu", 1, 1)[0].platform == "cpu"
    finally:
        jax.config.update("jax_platforms", before)
    assert find_devices(None, 1, 1)[0].platform == "cpu"  # JAX_PLATFORMS=cpu: asked for


def mesh_of(platform: str) -> Any:
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform, process_index=0, local_hardware_id=2)], object))


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert eager_device.eager_device(mesh_of("cpu")) == torch.device("cpu")
    with pytest.warns(
        UserWarning, match=r"one CPU, not compiled .*The mesh is of GPUs, but this torch, \S+, has no CUDA: install one"
    ):
        must_fall_back("auto", "why", mesh_of("gpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert eager_device.eager_device(mesh_of("gpu")) == torch.device("cuda", 2)
    with pytest.warns(UserWarning, match=r"one GPU, not compiled .*JAX has reserved most .* set XLATRAIN_EXECUTOR=eager.*why"):
        must_fall_back("auto", "why", mesh_of("gpu"))
