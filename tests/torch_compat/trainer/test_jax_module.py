"""An nnx module in the Trainer: the numbers of a loop written by hand, on any mesh, resumed, with hooks; mistakes are named."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec

import torch_compat as pl
import xlatrain
from tests import warm
from torch_compat.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    NonFiniteGuard,
    OnExceptionCheckpoint,
    SilentDataCorruptionCheck,
    Timer,
)
from torch_compat.cli import LightningCLI
from torch_compat.loggers import CSVLogger
from torch_compat.strategies import MeshStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.step.purity import ImpureFunctionError
from xlatrain.step.variables import StructureError


def quiet(**options: Any) -> pl.Trainer:
    given = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(**{"max_epochs": 2, "accelerator": "cpu", "devices": 1, **given, **options})


class Batches:
    """Batches of numpy arrays, the same in each epoch."""

    def __init__(self, count: int = 4, rows: int = 8) -> None:
        draw = np.random.RandomState(0)
        self.batches = [
            {"x": draw.randn(rows, 4).astype(np.float32), "y": draw.randn(rows, 1).astype(np.float32)} for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter(self.batches)


class Regression(xlatrain.JaxModule):
    """Batch norm, dropout, a schedule: everything that has state."""

    def __init__(self, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        self.inner = nnx.Linear(4, 8, use_bias=False, rngs=rngs)  # batch norm would take it out again
        self.norm: Any = nnx.BatchNorm(8, rngs=rngs)
        self.dropout: Any = nnx.Dropout(0.5, rngs=rngs)
        self.outer: Any = nnx.Linear(8, 1, rngs=rngs)
        self.scale = 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))

    def loss(self, batch: Any) -> jax.Array:
        return self.scale * ((self(batch["x"]) - batch["y"]) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"place": batch_idx + 10 * self.global_step + 100 * self.current_epoch})
        return loss

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(0.05, 100))


class Recorded(Regression):
    """Keeps the losses, counts and statistics that its hook sees."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        RECORDED.append((float(outputs["loss"]), int(self.dropout.rngs.count[...]), np.array(self.norm.mean[...])))


RECORDED: list[Any] = []


def by_hand(module: Regression, batches: list[Any], epochs: int) -> list[float]:
    optimizer = nnx.Optimizer(module, module.configure_optimizers(), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: m.loss(batch))(module)
        optimizer.update(module, grads)
        return loss

    return [float(step(module, optimizer, batch)) for _ in range(epochs) for batch in batches]


def values(module: Any) -> dict[str, np.ndarray]:
    def plain(value: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)

    return {str(path): plain(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(nnx.state(module))}


def assert_same(one: Any, other: Any, **tolerance: Any) -> None:
    first, second = values(one), values(other)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], err_msg=name, **tolerance)


@pytest.mark.parametrize("devices", [1, 8])
def test_numbers_are_those_of_a_loop_written_by_hand(devices: int) -> None:
    RECORDED.clear()
    module, expected = Recorded(), Recorded()
    trainer = quiet(devices=devices)
    trainer.fit(module, Batches(), Batches())
    losses = by_hand(expected, Batches().batches, 2)
    np.testing.assert_allclose([loss for loss, _, _ in RECORDED], losses, rtol=2e-5)
    assert [count for _, count, _ in RECORDED] == list(range(1, 9))
    assert_same(module, expected, rtol=1e-4, atol=1e-5)
    expected.eval()
    val = np.mean([float(expected.loss(batch)) for batch in Batches().batches])
    np.testing.assert_allclose(float(trainer.callback_metrics["val"]), val, rtol=1e-4)
    assert float(trainer.callback_metrics["place"]) == 3 + 70 + 100


def test_eager_steps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, eager = Regression(), Regression()
    quiet(max_epochs=1).fit(compiled, Batches(2))
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    quiet(max_epochs=1).fit(eager, Batches(2))
    assert_same(compiled, eager, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole, broken, resumed = Regression(), Regression(), Regression(1)
    quiet(max_epochs=3).fit(whole, Batches())
    saving = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=6, save_top_k=-1)
    quiet(max_steps=6, max_epochs=3, enable_checkpointing=True, callbacks=[saving]).fit(broken, Batches())
    quiet(max_epochs=3).fit(resumed, Batches(), ckpt_path=tmp_path / "last.ckpt")
    assert_same(whole, resumed, rtol=0, atol=0)


def test_parameters_are_split_by_rules_and_by_the_modules_own_annotations() -> None:
    class Split(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.inner.kernel.set_metadata(out_sharding=(None, "tensor"))

        def on_train_start(self) -> None:
            found.update({name: getattr(self, name).kernel[...].sharding.spec for name in ("inner", "outer")})

    found: dict[str, Any] = {}
    strategy = MeshStrategy({"data": 2, "tensor": 4}, [("outer.kernel", PartitionSpec("tensor", None))])
    split, whole = Split(), Regression()
    quiet(devices=8, strategy=strategy, max_epochs=1).fit(split, Batches())
    quiet(max_epochs=1).fit(whole, Batches())
    assert found == {"inner": PartitionSpec(None, "tensor"), "outer": PartitionSpec("tensor", None)}
    assert_same(split, whole, rtol=1e-4, atol=1e-5)


def test_what_a_hook_writes_counts_and_a_changed_attribute_makes_another_program() -> None:
    class Changing(Recorded):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.scale = 0.0
                self.norm.mean[...] = jnp.full(8, 7.0)

    RECORDED.clear()
    quiet(max_epochs=1).fit(Changing(), Batches())
    assert [loss == 0 for loss, _, _ in RECORDED] == [False, False, True, True]
    assert (RECORDED[1][2] < 1).all() and (RECORDED[2][2] > 6).all()


def test_predictions_tests_and_values_written_between_runs() -> None:
    module, trainer = Regression(), quiet(max_epochs=1)
    trainer.fit(module, Batches())
    first = np.concatenate(trainer.predict(module, _Inputs()))
    module.outer.kernel[...] = module.outer.kernel[...] * 0
    second = np.concatenate(trainer.predict(module, _Inputs()))
    module.eval()
    np.testing.assert_allclose(second, np.broadcast_to(np.asarray(module.outer.bias[...]), second.shape), rtol=1e-6)
    assert not np.allclose(first, second)


class _Inputs(Batches):
    def __iter__(self) -> Iterator[Any]:
        return iter([batch["x"] for batch in self.batches])


def test_variables_are_made_in_configure_model_and_loaders_are_the_modules() -> None:
    class Late(Regression):
        def __init__(self) -> None:
            pass

        def configure_model(self) -> None:
            Regression.__init__(self)

        def train_dataloader(self) -> Batches:
            return Batches()

    late, early = Late(), Regression()
    quiet().fit(late)
    quiet().fit(early, Batches())
    assert_same(late, early, rtol=0, atol=0)


def test_accumulated_batches_of_a_torch_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))

    class Plain(xlatrain.JaxModule):
        def __init__(self) -> None:
            self.layer = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

        def training_step(self, batch: Any) -> dict[str, jax.Array]:
            x, y = batch
            return {"loss": ((self.layer(x) - y) ** 2).mean(), "rows": jnp.asarray(x.shape[0])}

        def configure_optimizers(self) -> dict[str, Any]:
            return {"optimizer": optax.sgd(0.1)}

    accumulated, whole = Plain(), Plain()
    quiet(accumulate_grad_batches=2).fit(accumulated, torch.utils.data.DataLoader(data, batch_size=4))
    quiet().fit(whole, torch.utils.data.DataLoader(data, batch_size=8))
    assert_same(accumulated, whole, rtol=1e-5, atol=1e-6)


# -- mistakes ----------------------------------------------------------------------------------------------------------------

LEAKED: list[Any] = []


class _Leaks(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        LEAKED.append(batch["x"])
        return self.loss(batch)


class _Assigns(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        self.last = self.loss(batch)
        return self.last


class _AssignsBelow(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        self.norm.seen = batch["x"].mean()
        return self.loss(batch)


class _Appends(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"counts": [0]}

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        self.seen["counts"].append(1)
        return self.loss(batch)


class _Impure(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return self.loss(batch) * (time.perf_counter() % 1)  # float32 has no microseconds of an uptime


class _AsksTrainer(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return self.loss(batch) * self.trainer.max_epochs


class _Branches(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        loss = self.loss(batch)
        return loss if loss > 0 else -loss


class _GivesRows(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return batch["x"].mean(1)


class _OtherShape(Regression):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return self.loss({"x": batch["x"][:, :3], "y": batch["y"]})


class _Several(Regression):
    def configure_optimizers(self) -> Any:
        return [optax.sgd(0.1), optax.sgd(0.2)]


class _Manual(Regression):
    automatic_optimization = False


class _Gradients(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class _Nothing(xlatrain.JaxModule):
    def training_step(self, batch: Any) -> jax.Array:
        return batch["x"].mean()

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (_Leaks, ImpureFunctionError, "keeps an array of its trace"),
        (_Assigns, StructureError, r"test_jax_module.py:\d+\n  assigns self.last"),
        (_AssignsBelow, StructureError, r"self.norm.seen was"),
        (_Appends, StructureError, r"self.seen\['counts'\] is a list that a step changes"),
        (_Impure, ImpureFunctionError, "not compute the same each time"),
        (_AsksTrainer, RuntimeError, r"test_jax_module.py:\d+\n  self.trainer is of the host"),
        (_Branches, jax.errors.TracerBoolConversionError, "boolean conversion"),
        (_GivesRows, TypeError, r"test_jax_module.py:\d+: _GivesRows.training_step returned float32\[8\]"),
        (_OtherShape, TypeError, "contracting"),
        (
            _Several,
            MisconfigurationException,
            r"test_jax_module.py:\d+: _Several.configure_optimizers returned .*multi_transform",
        ),
        (_Manual, MisconfigurationException, "automatic_optimization is False"),
        (_Gradients, MisconfigurationException, r"test_jax_module.py:\d+: _Gradients.on_before_optimizer_step"),
        (_Nothing, MisconfigurationException, r"test_jax_module.py:\d+: _Nothing.configure_optimizers .* nothing to train"),
    ],
)
def test_mistakes_are_named(kind: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        quiet(max_epochs=1).fit(kind(), Batches(2))
    if kind in (_Branches, _OtherShape):
        assert "in training_step" in "".join(traceback.format_exception(raised.value))
    LEAKED.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16-mixed"}, "dtype=jnp.bfloat16"),
        ({"precision": "int8-mixed"}, r"qwix.quantize_model\(module, "),
        ({"callbacks": [LearningRateMonitor()], "logger": True}, r"LearningRateMonitor needs a learning rate.*self.log\('lr'"),
        ({"strategy": MeshStrategy({"data": 1}, remat=["*"])}, r"remat=…\) names torch modules"),
    ],
)
def test_what_is_about_torch_modules_is_refused_before_the_run(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        quiet(default_root_dir=tmp_path, **options).fit(Regression(), Batches())


def test_a_list_of_batches_is_several_loaders_and_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"train_dataloader: found arrays, expected loaders"):
        quiet().fit(Regression(), list(Batches()))


def test_a_batch_of_strings_is_refused() -> None:
    class Texts(Batches):
        def __iter__(self) -> Iterator[Any]:
            return iter([{**batch, "name": "a"} for batch in self.batches])

    with pytest.raises(MisconfigurationException, match=r"leaves of type .*collate_fn"):
        quiet().fit(Regression(), Texts())


@pytest.mark.slow
def test_a_gpt_of_torch_and_one_of_nnx_have_equal_losses() -> None:
    script = Path(__file__).with_name("two_gpts.py")
    done = warm.run(warm.OURS, [str(script), "30"], env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for torchs, nnxs in found.values():
        assert torchs[-1] < 0.7 * torchs[0]
        np.testing.assert_allclose(nnxs, torchs, rtol=1e-4)
    np.testing.assert_allclose(found["1"][1], found["8"][1], rtol=1e-4)


def test_callbacks_that_work_run_together(tmp_path: Path) -> None:
    callbacks = [
        DeviceStatsMonitor(),
        EarlyStopping("val"),
        EMAWeightAveraging(),
        LambdaCallback(),
        ModelCheckpoint(tmp_path / "saved", monitor="val"),
        ModelSummary(2),
        NonFiniteGuard(),
        OnExceptionCheckpoint(tmp_path / "failed"),
        SilentDataCorruptionCheck(2),
        Timer("00:01:00:00"),
    ]
    module = Regression()
    logger = CSVLogger(tmp_path)
    trainer = quiet(
        devices=8,
        default_root_dir=tmp_path,
        callbacks=callbacks,
        logger=logger,
        enable_checkpointing=True,
        enable_model_summary=True,
        log_every_n_steps=1,
    )
    trainer.fit(module, Batches(), Batches())
    assert "loss_step" in (Path(logger.log_dir) / "metrics.csv").read_text()
    again = Regression(1)
    saved: Any = trainer.checkpoint_callback
    (found,) = quiet().validate(again, Batches(), ckpt_path=saved.best_model_path)
    np.testing.assert_allclose(found["val"], saved.best_model_score, rtol=1e-5)


class Layers(xlatrain.JaxModule):
    """Four layers: one after the other, recomputed, or a scan over stacked ones; gradients of two batches an update."""

    def __init__(self, how: str) -> None:
        self.how = nnx.static(how)
        stacked = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=(0,)))
        self.layers: Any = stacked(nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(layer(x))

        if self.how != "one by one":
            inner = nnx.remat(layer) if self.how == "recomputed" else layer
            return nnx.scan(inner, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        for number in range(4):
            x = jnp.tanh(x @ self.layers.kernel[...][number] + self.layers.bias[...][number])
        return x

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        loss = ((self(batch["x"]) - batch["y"]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.MultiSteps:
        return optax.MultiSteps(optax.adam(0.05), every_k_schedule=2)


def layers_by_hand(batches: Batches) -> Layers:
    module = Layers("one by one")
    graph, state = nnx.split(module)
    tx = optax.MultiSteps(optax.adam(0.05), every_k_schedule=2)
    opt = tx.init(state)

    def loss(state: Any, batch: Any) -> jax.Array:
        return ((nnx.merge(graph, state)(batch["x"]) - batch["y"]) ** 2).mean()

    for _ in range(2):
        for batch in batches:
            updates, opt = tx.update(jax.grad(loss)(state, batch), opt, state)
            state = optax.apply_updates(state, updates)
    return nnx.merge(graph, state)


@pytest.mark.parametrize("how", ["one by one", "scanned", "recomputed"])
def test_transformed_layers_and_multisteps_give_the_numbers_of_a_loop_by_hand(how: str) -> None:
    module = Layers(how)
    before = np.asarray(module.layers.kernel[...])
    quiet().fit(module, Batches())
    wanted = layers_by_hand(Batches())
    assert np.abs(np.asarray(module.layers.kernel[...]) - before).max() > 1e-2
    np.testing.assert_allclose(module.layers.kernel[...], wanted.layers.kernel[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.layers.bias[...], wanted.layers.bias[...], rtol=1e-5, atol=1e-6)


def test_a_loader_of_grain() -> None:
    grain = pytest.importorskip("grain")
    rows = [{name: values[row] for name, values in batch.items()} for batch in Batches().batches for row in range(8)]
    loader = grain.MapDataset.source(rows).batch(8).to_iter_dataset()
    module, other = Layers("scanned"), Layers("scanned")
    quiet().fit(module, loader)
    quiet().fit(other, Batches())
    np.testing.assert_array_equal(module.layers.kernel[...], other.layers.kernel[...])


def test_preflight_examines_the_same_run() -> None:
    report = quiet(max_epochs=1, strategy="fsdp").preflight(Layers("scanned"), Batches(), topology="cpu:8")
    assert report.fits
    assert report.parameters == 4 * (4 * 4 + 4)
    assert dict(report.mesh)["fsdp"] == 8


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "got `Linear`, an nnx.Module without steps: derive it from xlatrain.JaxModule"),
        (Regression, r"the class itself: give an instance, Regression\(…\)"),
    ],
)
def test_what_is_no_module_with_steps_is_refused_with_the_next_step(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quiet().fit(model, Batches())


@pytest.mark.parametrize(("module", "found"), [(nnx.Linear, "the class Linear"), (torch.nn.Linear(1, 1), "a Linear")])
def test_what_is_no_nnx_module_is_refused(module: Any, found: str) -> None:
    with pytest.raises(TypeError, match=rf"jax_module: module is {found}; expected an instance of nnx\.Module"):
        pl.jax_module(module)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_spawned_processes_give_the_module_its_values() -> None:
    script = Path(__file__).with_name("jax_spawned.py")
    done = warm.run(warm.OURS, [str(script)], env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"}, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    early, late, together = json.loads(done.stdout.splitlines()[-1])
    assert early == late
    assert early[1] == together[1] == 2
    np.testing.assert_allclose(early[0], together[0], rtol=1e-5)


class Sized(Layers):
    """Has an argument for the command line."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__("scanned")
        self.seed = seed

    def train_dataloader(self) -> Batches:
        return Batches()


def test_the_command_line_makes_and_trains_a_jax_module() -> None:
    args = ["fit", "--model.seed=7", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=1"]
    quietly = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
    kind: Any = Sized
    cli: Any = LightningCLI(kind, args=[*args, *quietly], save_config_callback=None, seed_everything_default=False)
    assert cli.trainer.global_step == 4
    assert (type(cli.model), cli.model.seed) == (Sized, 7)
