"""JAX's 64-bit types are on where a run asks for them."""

from __future__ import annotations

import gc
from typing import Any

import jax
import pytest
import torch

import torch_compat as pl
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.fabric import Fabric
from torch_compat.utilities.wide_types import keep_wide_types, wide_types


def are_wide() -> bool:
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


class Looks(BoringModel):
    def on_train_batch_end(self, *args: object) -> None:
        self.wide = are_wide()


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_a_run_has_them_as_it_asks_and_puts_them_back(precision: Any) -> None:
    model = Looks()
    trainer = pl.Trainer(accelerator="cpu", devices=1, precision=precision, max_steps=1, limit_val_batches=0, logger=False)
    assert not are_wide()
    trainer.fit(model)
    assert (model.wide, are_wide()) == (precision == "64-true", False)
    assert model.layer.weight.dtype == (torch.float64 if precision == "64-true" else torch.float32)


def test_a_run_that_fails_puts_them_back() -> None:
    with pytest.raises(KeyError), wide_types(True):
        raise KeyError
    assert not are_wide()


def test_a_fabric_has_them_as_long_as_it_lives_but_for_runs_meanwhile() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    assert are_wide()
    with wide_types(False):
        assert not are_wide()
        with wide_types(True):
            assert are_wide()
        assert not are_wide()
    assert are_wide()
    Fabric(accelerator="cpu", devices=1)
    assert are_wide()
    del fabric
    gc.collect()
    keep_wide_types(object(), wide=False)
    assert not are_wide()


def test_who_switched_them_on_himself_has_them_in_each_run() -> None:
    with jax.enable_x64(True):
        with wide_types(True):
            assert are_wide()
        with wide_types(False):
            assert are_wide()
        assert are_wide()
