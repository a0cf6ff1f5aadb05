"""``xlatrain.fit``: the same numbers as under the Trainer, on one device and on eight, cut and resumed bit for bit; no torch."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import xlatrain
from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.purity import ImpureFunctionError
from xlatrain.step.variables import StructureError

ROOT = Path(xlatrain.__file__).parents[1]


class Net(xlatrain.JaxModule):
    """Has what is awkward: dropout's random streams, batch statistics, a count that hooks write, logged values of all kinds."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)
        self.epochs = nnx.Variable(jnp.zeros((), jnp.int32))
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x = self.dropout(nnx.relu(self.norm(self.layer(batch["x"]))))
        loss = self.scale * jnp.mean((self.out(x)[:, 0] - batch["y"]) ** 2)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("position", self.current_epoch * 100 + self.global_step * 10 + batch_idx)
        return loss

    def validation_step(self, batch: Any) -> None:
        x = self.dropout(nnx.relu(self.norm(self.layer(batch["x"]))))
        self.log("val_loss", jnp.mean((self.out(x)[:, 0] - batch["y"]) ** 2))

    def configure_optimizers(self) -> Any:
        return optax.adam(1e-2)

    def on_train_epoch_start(self) -> None:
        self.epochs[...] = self.epochs[...] + 1

    def on_train_epoch_end(self) -> None:
        self.log("epochs", self.epochs[...])


def batches(epoch: int, count: int = 3) -> list[Any]:
    draw = np.random.default_rng(epoch)
    return [
        {"x": draw.normal(size=(16, 4)).astype(np.float32), "y": draw.normal(size=16).astype(np.float32)} for _ in range(count)
    ]


class Loader:
    """An iterable that is no list, which to the Trainer is one of loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def mesh_of(devices: int) -> Any:
    return make_mesh({"fsdp": devices}, jax.devices()[:devices])


def values(module: Any) -> dict[str, np.ndarray]:
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        value = variable.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        found[".".join(map(str, path))] = np.asarray(jax.random.key_data(value) if is_key else value)
    return found


def fit(devices: int = 1, make: Any = Net, **options: Any) -> tuple[Any, list[Any]]:
    logged: list[Any] = []
    options = {"max_epochs": 2, "log_every_n_steps": 1, **options}
    found = xlatrain.fit(make, batches, batches(9), mesh=mesh_of(devices), log=lambda *one: logged.append(one), **options)
    return found, logged


def test_one_device_and_eight_agree_and_values_are_of_their_steps() -> None:
    (one, logged), (eight, _) = fit(1), fit(8)
    assert [values["position"] for _, values in logged if "position" in values] == [0, 11, 22, 130, 141, 152]
    assert [step for step, values in logged if "val_loss" in values] == [3, 6]
    losses = [values["loss_step"] for step, values in logged if "loss_step" in values]
    assert one.metrics["loss_epoch"] == pytest.approx(np.mean(losses[3:]))
    assert (one.step, one.epoch, one.metrics["epochs"]) == (6, 2, 2)
    assert one.metrics.keys() == eight.metrics.keys()
    for name, value in values(one.module).items():
        np.testing.assert_allclose(values(eight.module)[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("cut", [2, 3])
def test_cut_and_resumed_bit_for_bit(tmp_path: Path, cut: int) -> None:
    whole, logged = fit(8)
    path = tmp_path / "run.ckpt"
    fit(8, max_steps=cut, checkpoint_path=path)
    resumed, after = fit(8, checkpoint_path=path)
    assert (resumed.step, resumed.epoch, resumed.metrics) == (whole.step, whole.epoch, whole.metrics)
    assert [one for one in logged if one[0] > cut] == [one for one in after if one[0] > cut]
    for name, value in values(whole.module).items():
        np.testing.assert_array_equal(values(resumed.module)[name], value, err_msg=name)
    assert fit(8, checkpoint_path=path)[1] == []  # there is nothing left to do


def test_a_hook_changes_a_plain_attribute() -> None:
    class Scaled(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.scale = 0.0 if batch_idx else 1.0

    _, logged = fit(make=Scaled, max_epochs=1)
    losses = [values["loss_step"] for _, values in logged if "loss_step" in values]
    assert losses[0] > 0 and losses[1:] == [0, 0]


def test_what_only_the_trainer_has_is_refused_by_name() -> None:
    class WithLoader(Net):
        def train_dataloader(self) -> Any:
            return []

    class Asks(Net):
        def configure_optimizers(self) -> Any:
            return optax.sgd(1 / self.trainer.estimated_stepping_batches)

    with pytest.raises(TypeError, match=r"test_fit.py:\d+: WithLoader.train_dataloader: xlatrain.fit does not call it.*Trainer"):
        fit(make=WithLoader)
    with pytest.raises(RuntimeError, match=r"Asks\.trainer: xlatrain.fit has no Trainer"):
        fit(make=Asks)
    with pytest.raises(TypeError, match=r"make_module is a Net; expected a function of nnx\.Rngs that makes one"):
        fit(make=Net(nnx.Rngs(0)))
    with pytest.raises(ValueError, match="give max_epochs, max_steps or both"):
        fit(max_epochs=None)
    with pytest.raises(ValueError, match="train_batches gave no batch in epoch 0"):
        xlatrain.fit(Net, [], max_epochs=1)


def test_what_is_logged_without_a_logger_is_a_metric_that_log_is_not_told() -> None:
    class Quiet(Net):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("quiet", loss, on_step=True, on_epoch=True, logger=False)
            return loss

    found, logged = fit(make=Quiet, max_epochs=1)
    assert {"quiet_step", "quiet_epoch"} <= found.metrics.keys()
    assert not any(name.startswith("quiet") for _, values in logged for name in values)


def test_a_step_that_does_more_than_compute_is_refused() -> None:
    class Draws(Net):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return super().training_step(batch, batch_idx) * random.random()

    class Appends(Net):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(rngs)
            self.losses: list[Any] = []

        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.losses.append(0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ImpureFunctionError, match="Draws does not compute the same each time"):
        fit(make=Draws)
    with pytest.raises(StructureError, match=r"self\.losses is a list that a step changes"):
        fit(make=Appends)


def test_the_trainer_computes_the_same() -> None:
    import torch_compat as pl

    data, val = Loader(batches(0)), Loader(batches(9))
    module = Net(nnx.Rngs(0))
    alone = xlatrain.fit(Net, data, val, max_epochs=2, mesh=mesh_of(1))
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, data, val)
    for name, value in alone.metrics.items():
        np.testing.assert_allclose(float(trainer.callback_metrics[name]), value, rtol=1e-4, err_msg=name)
    for name, value in values(alone.module).items():
        np.testing.assert_allclose(values(module)[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_example_runs_without_torch(devices: int, tmp_path: Path) -> None:
    program = """
        import sys
        sys.modules.update(dict.fromkeys(("torch", "torch_compat", "lightning")))  # importing them raises ImportError
        sys.path.insert(0, "examples")
        import nnx_alone
        assert nnx_alone.main(int(sys.argv[1]), sys.argv[2]) > 0.95
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(devices), str(tmp_path / "a.ckpt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
