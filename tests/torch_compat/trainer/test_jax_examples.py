"""The examples with nnx modules learn, on one device or on eight; one with a Linen module inside resumes bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

import torch_compat as pl

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.slow
def test_they_learn(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # the GAN seeds everything
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    assert example("nnx_vit").main(8, 8) > 0.6
    assert example("nnx_diffusion").main(1, 3) < 0.5
    assert abs(example("nnx_gan").main(1, 5) - 0.23) < 0.1


def test_linen_inside_resumes_bit_for_bit(example: Any, tmp_path: Path) -> None:
    def fit(epochs: int, resume: Path | None = None) -> Any:
        module = example("nnx_diffusion").Diffusion(nnx.Rngs(0))
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=8, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(example("nnx_digits").digits(128, seed=0), 4), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    whole = fit(2)
    fit(1)
    resumed = fit(2, tmp_path / "1.ckpt")
    first, second = (nnx.to_flat_state(nnx.state(one, nnx.Param)) for one in (whole, resumed))
    for (path, one), (_, other) in zip(first, second, strict=True):
        np.testing.assert_array_equal(one[...], other[...], err_msg=str(path))
