"""A bit flipped on one device is found and named, before a checkpoint holds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import torch_compat as pl
from tests.torch_compat.callbacks.flipped_bits import flipped
from torch_compat.callbacks import ModelCheckpoint, SilentDataCorruptionCheck
from torch_compat.fabric import Fabric
from torch_compat.strategies.mesh import MeshStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.engine import Engine
from xlatrain.step.replicas import ReplicaCheck, SilentDataCorruptionError, bit_sum

DATA_BESIDE_FSDP = {"data": 2, "fsdp": 4}


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.norm = torch.nn.BatchNorm1d(64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.second(self.norm(self.first(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Flip(pl.Callback):
    """Flips a bit on one device after a step."""

    def __init__(self, step: int, field: str, find: Callable[[Any], bool], device: int) -> None:
        self.step, self.field, self.find, self.device = step, field, find, device

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            placed: Any = trainer.strategy.placed
            tree = getattr(placed.state, self.field)
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree) if self.find(jax.tree_util.keystr(path))]
            change = lambda path, leaf: flipped(leaf, self.device) if path == paths[0] else leaf  # noqa: E731
            placed.state = replace(placed.state, **{self.field: jax.tree_util.tree_map_with_path(change, tree)})


def fit(path: Path, strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    saver = ModelCheckpoint(path, every_n_train_steps=4, save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options = {"accelerator": "cpu", "devices": 8, "max_epochs": 1, **options}
    trainer = pl.Trainer(strategy=strategy, callbacks=[*callbacks, saver], **quiet, **options)
    torch.manual_seed(1)
    rows = [torch.randn(16) for _ in range(8 * 12)]
    trainer.fit(Model(), torch.utils.data.DataLoader(rows, batch_size=1))  # pyright: ignore[reportArgumentType]
    return trainer


FLIPS = {
    "a parameter": ("params", lambda path: "first.weight" in path, "params.first.weight"),
    "optimizer state": ("opt_state", lambda path: "second.weight" in path, r"opt_state\.\S*second.weight"),
    "a buffer": ("buffers", lambda path: "running_var" in path, "buffers.norm.running_var"),
}


@pytest.mark.parametrize("what", FLIPS)
def test_a_device_with_a_flipped_bit_is_named_before_the_next_checkpoint(what: str, tmp_path: Path) -> None:
    field, find, path = FLIPS[what]
    check = SilentDataCorruptionCheck(every_n_train_steps=100)  # that of the checkpoint comes first
    said = rf"at step 8: cpu:5 \(process 0, host \S+\) holds other bits of .*{path}.* than the 7 replica"
    with pytest.raises(SilentDataCorruptionError, match=said):
        fit(tmp_path, "ddp", check, Flip(6, field, find, 5))
    assert [one.name for one in tmp_path.glob("*.ckpt")] == ["epoch=0-step=4.ckpt"]


def test_with_two_replicas_of_a_shard_both_are_named_and_every_n_steps_is_obeyed(tmp_path: Path) -> None:
    flip = Flip(5, "params", lambda path: "first.weight" in path, 6)
    said = r"at step 6: cpu:2 \(.*\) and cpu:6 \(.*\) hold different bits of params.first.weight, and no bits have a majority"
    with pytest.raises(SilentDataCorruptionError, match=said):
        fit(tmp_path, MeshStrategy(axes=DATA_BESIDE_FSDP, min_size=1), SilentDataCorruptionCheck(3), flip)


def test_what_lies_on_one_device_is_named_as_not_checked(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"cannot check \d+% of the state, .*: params\.first\.weight, .*; a data axis beside"):
        fit(tmp_path, MeshStrategy(axes={"fsdp": 8}, min_size=512), SilentDataCorruptionCheck(4))
    with pytest.raises(MisconfigurationException, match=r"no parameter has a replica on 8 CPU devices · fsdp 8 .*a data axis"):
        fit(tmp_path, MeshStrategy(axes={"fsdp": 8}, min_size=1), SilentDataCorruptionCheck(4))


def test_a_healthy_run_goes_on_and_its_report_says_what_it_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_REPORT", str(tmp_path / "report.json"))
    monkeypatch.setenv("XLATRAIN_SDC_CHECK", "5")
    trainer = fit(tmp_path, "ddp")
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # on the host, where nothing has a replica
    (run,) = json.loads((tmp_path / "report.json").read_text())["runs"]
    facts = run["replica_checks"]
    assert facts["checks"] == 2 + 3 + 1  # every 5 of 12 steps, three checkpoints, at the end
    assert facts["unchecked"] == 0 and facts["checked_bytes"] > 3 * 4 * (16 * 64 * 2)
    assert 0 < facts["seconds"] < run["seconds"]["step"] + run["seconds"]["save"] + run["seconds"]["setup"]


def test_where_it_cannot_look_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match="replicas of several devices, and the mesh has 1 CPU device"):
        fit(tmp_path, "auto", SilentDataCorruptionCheck(), devices=1)
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    with pytest.raises(MisconfigurationException, match="steps run eagerly"):
        fit(tmp_path, "ddp", SilentDataCorruptionCheck())
    monkeypatch.setenv("XLATRAIN_SDC_CHECK", "often")
    with pytest.raises(
        MisconfigurationException, match=r"every_n_train_steps='often'\) \(or XLATRAIN_SDC_CHECK\): expected a whole"
    ):
        pl.Trainer()


def test_fabric_checks_where_its_loop_asks() -> None:
    fabric = Fabric(accelerator="cpu", devices=8, strategy="ddp")
    fabric.launch()
    layer = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9))
    with pytest.raises(MisconfigurationException, match="nothing has run on the mesh yet"):
        fabric.check_replicas()
    fabric.backward(model(torch.ones(8, 4)).sum())
    optimizer.step()
    fabric.check_replicas("at step 1")
    placed = fabric._model.placed
    assert placed is not None
    placed.state = replace(placed.state, params={**placed.state.params, "weight": flipped(placed.state.params["weight"], 3)})
    with pytest.raises(SilentDataCorruptionError, match=r"at step 1: cpu:3 .* holds other bits of params.weight than the 7"):
        fabric.check_replicas("at step 1")


def test_the_engine_of_a_loop_of_ones_own() -> None:
    mesh = make_mesh({"data": 4, "fsdp": 2})
    state = Engine(lambda rngs: nnx.Linear(64, 64, rngs=rngs), optax.adam(0.1), mesh=mesh).init()
    check = ReplicaCheck(mesh)
    check.check(state, "at the start")
    state = replace(state, params={**state.params, "kernel": flipped(state.params["kernel"], 2)})
    with pytest.raises(SilentDataCorruptionError, match=r"cpu:2 .* holds other bits of params.kernel than the 3 replica"):
        check.check(state, "at step 3")


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint16", "bool", "complex64"]
)
def test_every_bit_of_every_element_counts(dtype: str) -> None:
    rng = np.random.default_rng(0)
    array = jax.numpy.asarray(rng.integers(0, 2, (2, 3)) if dtype == "bool" else rng.normal(size=(2, 3)) * 9).astype(dtype)
    total = jax.jit(bit_sum)
    whole, size = int(total(array)), array.dtype.itemsize
    for bit in range(array.nbytes * 8):
        bits = np.asarray(array).copy().view(np.uint8).reshape(-1)
        if dtype == "bool" and bit % 8:
            continue
        bits[bit // 8] ^= 1 << bit % 8
        other = jax.numpy.asarray(bits.view(np.asarray(array).dtype).reshape(2, 3))
        assert int(total(other)) != whole, f"bit {bit} of elements of {size} bytes"
