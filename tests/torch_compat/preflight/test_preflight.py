"""Trainer.preflight in this process: what it predicts is what a run takes, on CPU meshes; strategies compile for TPUs."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from jax.sharding import PartitionSpec
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import Callback
from torch_compat.preflight import PreflightError
from torch_compat.strategies import DDPStrategy, FSDPStrategy, MeshStrategy
from xlatrain.preflight import TopologyError
from xlatrain.preflight.budget import assert_collectives, assert_fits
from xlatrain.preflight.plan import differences, read_plan


class Classifier(LightningModule):
    def __init__(self, width: int = 256, lazy: bool = False) -> None:
        super().__init__()
        self.width = width
        self.net = torch.nn.Identity()
        if not lazy:
            self.configure()

    def configure(self) -> None:
        linear = torch.nn.Linear
        self.net = torch.nn.Sequential(linear(32, self.width), torch.nn.ReLU(), linear(self.width, 16))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(rows: int = 64, batch_size: int = 8) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(rows, 32), torch.randint(0, 16, (rows,))), batch_size=batch_size)


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, **quiet, **options)


class Measured(Callback):
    """Bytes of the training state on the first device."""

    def __init__(self) -> None:
        self.params = self.optimizer = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        state = trainer.strategy.placed.state
        first = trainer.strategy.mesh.devices.flat[0]

        def here(tree: Any) -> int:
            shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first]
            return sum(shard.data.nbytes for shard in shards)

        self.params, self.optimizer = here((state.params, state.buffers)), here(state.opt_state)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "tensor"])
def test_predicted_memory_is_what_a_run_of_the_same_mesh_takes(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, measured = Classifier(), Measured()
    chosen = strategy
    if strategy == "tensor":
        split = (("net.0.weight", PartitionSpec("tensor")), ("net.2.weight", PartitionSpec(None, "tensor")))
        chosen = MeshStrategy({"fsdp": 4, "tensor": 2}, split)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run = trainer(strategy=chosen, devices=8, callbacks=[measured])
    batches = loader(batch_size=16 if strategy == "tensor" else 8)
    report = run.preflight(module, batches, batches, topology="cpu:8", output=tmp_path, store=True)
    assert report.fits and report.mesh.get("fsdp", report.mesh.get("data")) == (4 if strategy == "tensor" else 8)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    run.fit(module, batches)
    assert report.bytes_per_chip["parameters"] == measured.params
    assert report.bytes_per_chip["optimizer"] == measured.optimizer
    assert report.parameters == sum(p.numel() for p in module.parameters())
    # forward, and gradients of both weights and of the hidden layer; 64 rows on the mesh
    assert report.flops_per_step == 2 * 64 * (2 * 32 * 256 + 3 * 256 * 16)
    monkeypatch.setenv("XLATRAIN_PLAN", str(tmp_path / "plan.json"))
    with caplog.at_level("INFO"):
        trainer(strategy=chosen, devices=8).fit(Classifier(), batches)
    assert "The first step is as" in caplog.text
    kept = gzip.decompress((tmp_path / "programs" / "train.stablehlo.mlir.gz").read_bytes())
    assert read_plan(tmp_path / "plan.json")["stablehlo"]["sha256"] == hashlib.sha256(kept).hexdigest()
    if strategy == "tensor":
        assert report.collectives["tensor"]  # of the hidden layer, whose features are split
        return
    with pytest.warns(
        UserWarning,
        match=r"(?s)differs from the plan .* for cpu:8:.*global_batch_rows: planned 64, now 32.*the program: its StableHLO",
    ):
        trainer(strategy=strategy, devices=8).fit(Classifier(), loader(batch_size=4))
    kinds = report.collectives["fsdp" if strategy == "fsdp" else "data"]
    assert ("all-gather" in kinds) == (strategy == "fsdp")
    plan = read_plan(tmp_path / "plan.json")
    assert (
        differences(plan, {"mesh": report.mesh, "total": plan["bytes_per_chip"]["total"], "collectives": plan["collectives"]})
        == []
    )
    told = differences(plan, {"mesh": {"data": 2}, "total": 2 * plan["bytes_per_chip"]["total"], "collectives": {}})
    assert len(told) == 3 and told[0].startswith("mesh: planned")


def test_what_the_state_takes_is_told_before_anything_is_captured() -> None:
    """And what no axis divides: 17 x 32 parameters beside those of the hidden layer."""
    told: list[str] = []

    class Odd(Classifier):
        def configure(self) -> None:
            self.net = torch.nn.Linear(32, 17, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("captured")

    strategy = MeshStrategy({"fsdp": 3}, min_size=1)
    with pytest.raises(RuntimeError, match="captured"):
        trainer(devices=3, strategy=strategy, accumulate_grad_batches=2).preflight(
            Odd(), loader(batch_size=2), topology="cpu:3", progress=told.append
        )
    kib = 17 * 32 * 4 / 1024
    assert f"parameters {kib:.2f} KiB, gradients {2 * kib:.2f} KiB, optimizer {2 * kib:.2f} KiB" in told[1]
    assert told[2].startswith(f"whole on each of 3 devices: {3 * kib:.2f} KiB, the largest net.weight [17, 32], ")
    assert told[3:] == ["tracing the steps"]


def test_accumulation_and_hooks_on_gradients_have_programs_of_their_own() -> None:
    class Clipped(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise AssertionError("nothing runs")

    report = trainer(devices=8, strategy="fsdp", accumulate_grad_batches=4).preflight(Classifier(), loader(), topology="cpu:8")
    assert [(one.name, one.runs) for one in report.steps] == [("accumulate", 3), ("train", 1)]
    once = trainer(devices=8, strategy="fsdp").preflight(Classifier(), loader(), topology="cpu:8")
    assert report.flops_per_step == 4 * once.flops_per_step
    split = trainer(devices=8, strategy="fsdp").preflight(Clipped(), loader(), topology="cpu:8")
    assert [one.name for one in split.steps] == ["train", "update"]
    assert "on_before_optimizer_step" in split.notes[-1]


def test_budgets_say_what_is_too_large() -> None:
    uneven = DataLoader(loader().dataset, batch_sampler=[list(range(8)), list(range(6))])
    report = trainer(devices=8, strategy="fsdp").preflight(Classifier(), uneven, topology="cpu:8")
    assert report.notes[0].startswith("batches differ in shape: float32[8, 32], int64[8] and float32[6, 32], int64[6].")
    assert_fits(report, gib_per_chip=1)
    assert_collectives(report, "fsdp", at_most=10e6)
    assert_collectives(report, "tensor", at_most=0)
    with pytest.raises(AssertionError, match=r"over the budget of .* optimizer .*Largest arrays: .*net\.0\.weight"):
        assert_fits(report, gib_per_chip=1e-6)
    with pytest.raises(AssertionError, match=r"collectives on axis 'fsdp' take .* all-gather"):
        assert_collectives(report, "fsdp", at_most=10)


def test_what_cannot_be_examined_says_why() -> None:
    class Branches(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss.detach().numpy() > 1 else loss

    class Reads(Classifier):
        def on_fit_start(self) -> None:
            self.norm = float(self.net[0].weight.norm())

    with pytest.raises(PreflightError, match=r"(?s)cannot be captured.*test_preflight\.py"):
        trainer(devices=1).preflight(Branches(), loader(), topology="cpu:2")
    with pytest.raises(PreflightError, match=r"the values of 'net\.0\.weight' were read"):
        trainer(devices=1).preflight(Reads(), loader(), topology="cpu:2")
    with pytest.raises(PreflightError, match="gives no batch"):
        trainer(devices=1).preflight(Classifier(), [], topology="cpu:2")
    with pytest.raises(ValueError, match=r"need 3 devices, but there are 8"):
        trainer(strategy=MeshStrategy({"data": 3})).preflight(Classifier(), loader(), topology="cpu:8")
    with pytest.raises(TopologyError, match="near: v5e:4x4"):
        trainer(devices=1).preflight(Classifier(), loader(), topology="v5e:4x5")


def test_a_search_ranks_and_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(strategy="fsdp", devices=2)
    rules = {"search_rules": {"by features": [("net.2.weight", PartitionSpec(None, "fsdp"))]}}
    given = {"topology": "cpu:2", "output": tmp_path, **rules}
    report = run.preflight(Classifier(), loader(batch_size=2), search_s=300.0, **given)
    meshes = [f"MeshStrategy({{'data': {data}, 'fsdp': {2 // data}}})" for data in (1, 2)]
    batches, named = ["", ", batch_size / 2 with accumulate_grad_batches × 2"], ["", ", rules 'by features'"]
    assert {one["what"] for one in report.search} == {m + batch + rule for m in meshes for batch in batches for rule in named}
    assert all(one["fits"] for one in report.search)
    totals = {one["what"]: one["total"] for one in report.search}
    assert totals[meshes[0]] < totals[meshes[1]]  # split parameters take less than replicated ones
    best = read_plan(tmp_path / "best_plan.json")
    assert f"MeshStrategy({best['mesh']})" in report.search[0]["what"]
    monkeypatch.setenv("XLATRAIN_PLAN", str(tmp_path / "best_plan.json"))
    taken = trainer(strategy="auto", devices=2).strategy
    assert isinstance(taken, MeshStrategy) and taken.axes == best["mesh"]
    assert isinstance(trainer(strategy="ddp", devices=2).strategy, DDPStrategy)  # what a script chooses stays
    kept = (tmp_path / "search.json").read_text()
    again = run.preflight(Classifier(), loader(batch_size=2), search_s=0.0, **given)
    assert again.search == report.search and (tmp_path / "search.json").read_text() == kept
    with pytest.raises(PreflightError, match="holds a search for topology cpu:2, not cpu:4"):
        run.preflight(Classifier(), loader(batch_size=2), search_s=0.0, **{**given, "topology": "cpu:4"})


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    """The verdict is shown, the bars of memory have their colours, and the page has no need of a server."""
    from PIL import Image

    run = trainer(strategy="fsdp", devices=2)
    run.preflight(Classifier(), loader(), topology="cpu:2", output=tmp_path)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1000,1400", f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "preflight.html").as_uri()]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    with Image.open(tmp_path / "page.png") as image:
        drawn = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or ()}
    assert {(0x3B, 0x6F, 0xB6), (0x5A, 0xA4, 0x69), (0x2C, 0x7A, 0x46)} <= drawn  # parameters, optimizer, and "fits"


_STRATEGIES = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "hybrid": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    "tensor": lambda: MeshStrategy({"data": 2, "tensor": 2}, (("net.0.weight", PartitionSpec("tensor")),)),
}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_every_strategy_compiles_for_tpus(strategy: str, topology: str) -> None:
    run = trainer(strategy=_STRATEGIES[strategy](), precision="bf16-mixed")
    report = run.preflight(Classifier(), loader(), topology=topology)
    assert report.fits and report.chips == 4
    assert report.bytes_per_chip["hbm"] == int({"v5e": 15.75, "v5p": 95.74}[topology[:3]] * 2**30)
    assert report.estimate is not None and 0 < report.estimate.mfu < 1
    axes = {"ddp": {"data"}, "fsdp": {"fsdp"}, "hybrid": {"data", "fsdp"}, "tensor": {"data"}}[strategy]
    assert axes <= {axis for name in report.collectives for axis in name.split("+")}
    split = {"ddp": 1, "fsdp": 4, "hybrid": 2}.get(strategy)
    if split is not None:
        weight = next(one for one in report.largest if one.path == "net.0.weight")
        assert weight.bytes_per_chip == 256 * 32 * 4 // split and weight.replicas == 4 // split


def test_a_module_without_values_is_captured() -> None:
    """Its parameters are live ones of deferred ones: to the step ordinary parameters."""
    run = trainer(devices=8, strategy="fsdp")
    with run.init_module():
        module = Classifier()
    report = run.preflight(module, loader(), topology="cpu:8")
    assert report.bytes_per_chip["parameters"] == 4 * sum(one.numel() for one in module.parameters()) // 8


@pytest.mark.slow
def test_what_does_not_fit_says_what_would() -> None:
    """20 GB of parameters and AdamW state, made without memory, on chips of 16 GB: replicated no, split yes."""
    run = trainer(strategy="ddp")
    with run.init_module():
        module = Classifier(width=1 << 25)
    report = run.preflight(module, loader(), topology="v5e:4x4")
    assert not report.fits and report.missing > 2**32
    assert report.steps[0].refused is not None and len(report.contributors) == 5
    assert report.contributors[0]["bytes_per_chip"] > 2**32
    fsdp = next(change for change in report.changes if "fsdp" in change.what)
    assert fsdp.fits and fsdp.total < report.bytes_per_chip["hbm"]
    larger = next(change for change in report.changes if "v5e:4x8" in change.what)
    assert larger.fits is False
    assert str(report).startswith("DOES NOT FIT")
