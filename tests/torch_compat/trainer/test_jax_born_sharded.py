"""Variables that a JaxModule makes in ``configure_model``: born on the mesh, the same on any, and never whole on the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import torch_compat as pl
import xlatrain
from xlatrain.host.host_memory import LIMIT_VARIABLE

NOTHING_WHOLE = str(1 << 20)  # bytes: less than the large kernel, more than the small ones


class Batches:
    """Batches of numpy arrays, the same in each epoch."""

    def __init__(self) -> None:
        draw = np.random.RandomState(0)
        self.batches = [(draw.randn(16, 8).astype(np.float32), draw.randn(16, 1).astype(np.float32)) for _ in range(3)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Born(xlatrain.JaxModule):
    """Makes its layers with random streams that were there before."""

    def __init__(self, dtype: Any = None) -> None:
        self.rngs = nnx.Rngs(3)
        self.dtype = dtype
        self.large: Any = nnx.data(None)

    def configure_model(self) -> None:
        if self.large is None:
            self.inner = nnx.Linear(8, 640, rngs=self.rngs)
            self.norm = nnx.BatchNorm(640, rngs=self.rngs)
            self.large = nnx.Linear(640, 640, dtype=self.dtype, rngs=self.rngs)
            self.dropout: Any = nnx.Dropout(0.2, rngs=self.rngs)
            self.outer = nnx.Linear(640, 1, kernel_init=nnx.initializers.orthogonal(), rngs=self.rngs)

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        x = nnx.relu(self.large(self.norm(self.inner(batch[0]))))
        loss = ((self.outer(self.dropout(x)) - batch[1]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def on_train_start(self) -> None:
        kernel = self.large.kernel[...]
        FIRST.append((np.array(kernel), {shard.data.shape for shard in kernel.addressable_shards}))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        LOSSES.append(float(outputs["loss"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


LOSSES: list[float] = []
FIRST: list[Any] = []


def fit(module: Any, devices: int, strategy: str, **options: Any) -> list[float]:
    LOSSES.clear()
    FIRST.clear()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **options,
    )  # fmt: skip
    trainer.fit(module, Batches())
    return list(LOSSES)


def test_values_are_those_of_the_constructor_and_the_same_on_any_mesh() -> None:
    expected = Born()
    expected.configure_model()
    alone, split = Born(), Born()
    losses = fit(alone, 1, "auto")
    np.testing.assert_allclose(FIRST[0][0], expected.large.kernel[...], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(fit(split, 8, "fsdp"), losses, rtol=1e-5)
    assert FIRST[0][1] == {(80, 640)}
    np.testing.assert_allclose(FIRST[0][0], expected.large.kernel[...], rtol=1e-5, atol=1e-8)
    assert int(split.rngs.default.count[...]) == int(expected.rngs.default.count[...])
    assert int(split.dropout.rngs.count[...]) == 3


def test_nothing_is_whole_on_the_host_and_another_trainer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = Born()
    fit(twice, 8, "fsdp")
    continued = fit(twice, 8, "fsdp")
    monkeypatch.setenv(LIMIT_VARIABLE, NOTHING_WHOLE)
    module = Born()
    fit(module, 8, "fsdp")
    assert not module.large.kernel[...].is_fully_replicated
    np.testing.assert_allclose(fit(module, 8, "fsdp"), continued, rtol=1e-5)
    assert not module.large.kernel[...].is_fully_replicated


def test_mixed_precision_is_that_of_the_layers() -> None:
    module = Born(jnp.bfloat16)
    losses = fit(module, 8, "fsdp")
    np.testing.assert_allclose(losses, fit(Born(), 8, "fsdp"), rtol=0.05)
    assert losses != LOSSES
    assert module.large.kernel[...].dtype == jnp.float32


def test_true_half_precision() -> None:
    module = Born()
    assert np.isfinite(fit(module, 8, "fsdp", precision="bf16-true")).all()
    assert FIRST[0][0].dtype == jnp.bfloat16


def test_a_constructor_that_reads_values_runs_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(Born):
        def configure_model(self) -> None:
            super().configure_model()
            self.scale = float(self.inner.kernel[...].std())

    module, usual = Reads(), Born()
    with caplog.at_level(logging.INFO):
        losses = fit(module, 1, "auto")
    assert "Reads.configure_model cannot be traced" in caplog.text
    assert module.scale > 0
    np.testing.assert_allclose(losses, fit(usual, 1, "auto"), rtol=1e-5)


def test_preflight_makes_nothing() -> None:
    class Plain(Born):
        def on_train_start(self) -> None: ...

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=8, strategy="fsdp", logger=False, enable_checkpointing=False)
    report = trainer.preflight(Plain(), Batches(), topology="cpu:8")
    assert report.fits
    assert report.parameters == 8 * 640 + 640 * 640 + 4 * 640 + 640 + 1


def test_an_error_of_the_constructor_is_the_users() -> None:
    class Wrong(Born):
        def configure_model(self) -> None:
            raise KeyError("no such size")

    with pytest.raises(KeyError, match="no such size"):
        fit(Wrong(), 1, "auto")
