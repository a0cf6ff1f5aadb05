"""Other formats: what is written is what other programs read, and stock Lightning continues from our runs."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
from tests import warm
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.checkpoint import stock_loops
from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict
from torch_compat.cli import checkpoint_formats as formats
from xlatrain import checkpoint
from xlatrain.cli import main

ROOT = Path(__file__).parents[2]


class Model(pl.LightningModule):
    def __init__(self, hidden: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        loss = self.model(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1))), 2)


def trained(folder: Path, epochs: int, **options) -> Model:
    torch.manual_seed(0)
    module = Model()
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, monitor="loss", save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=4, strategy="fsdp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, loader(), **options)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained(folder, 2)
    return folder


def test_safetensors_in_one_file_and_in_several(run, tmp_path):
    expected = load_checkpoint_dict(run / "step=8.ckpt")["state_dict"]
    assert formats.to_safetensors(run / "step=8.ckpt", tmp_path / "one") == [tmp_path / "one" / "model.safetensors"]
    one = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    assert one.keys() == expected.keys() and all(torch.equal(one[name], expected[name]) for name in one)

    written = formats.to_safetensors(run / "step=8.ckpt", tmp_path / "several", prefix="model.", max_file_size=100)
    index = json.loads(written[-1].read_text())
    assert len(written) > 2 and index["metadata"]["total_size"] == sum(v.nbytes for k, v in expected.items() if k != "count")
    several = {}
    for file in written[:-1]:
        several |= safetensors.torch.load_file(file)
    assert index["weight_map"].keys() == several.keys() == {name[6:] for name in expected if name != "count"}
    torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).load_state_dict(several)
    with pytest.raises(checkpoint.ForeignPathError, match=r"holds model-00001"):
        formats.to_safetensors(run / "step=8.ckpt", tmp_path / "several")
    with pytest.raises(ValueError, match=r"no weight begins with 'net\.'; names are"):
        formats.to_safetensors(run / "step=8.ckpt", tmp_path / "none", prefix="net.")


def test_command_lists_shows_compares_verifies_converts_and_prunes(run, tmp_path, capsys):
    def ckpt(*arguments, status=0):
        assert main(["ckpt", *map(str, arguments)]) == status, capsys.readouterr()
        return capsys.readouterr().out

    listed = json.loads(ckpt("ls", run, "--json"))
    assert [(one["step"], one["state"]) for one in listed] == [(step, "complete") for step in (8, 6, 4, 2)]
    assert all(one["metrics"]["loss"] > 0 for one in listed)
    assert "step=8.ckpt" in ckpt("ls", run)

    shown = json.loads(ckpt("show", run / "step=8.ckpt", "--json"))
    weight = next(one for one in shown["arrays"] if one["name"] == "state_dict/model.0.weight")
    assert weight["shape"] == [16, 3] and shown["facts"]["step"] == 8
    same = ckpt("diff", run / "step=8.ckpt", run / "step=8.ckpt")
    assert f"the {len(shown['arrays'])} arrays are the same" in same
    differing = {
        one["array"]: one["difference"]
        for one in json.loads(ckpt("diff", run / "step=8.ckpt", run / "step=6.ckpt", "--json", status=1))
    }
    assert "48 of 48 values" in differing["state_dict/model.0.weight"]

    assert "intact" in ckpt("verify", run / "step=8.ckpt", run / "step=6.ckpt")
    both = ckpt("verify", tmp_path / "nowhere", run / "step=8.ckpt", status=1)
    assert "step=8.ckpt: intact" in both and "NOT READABLE: no checkpoint at" in both
    largest = max((run / "step=2.ckpt").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert f"{largest.name}: its bytes are not" in ckpt("verify", run / "step=2.ckpt", status=1)

    ckpt("convert", run / "step=8.ckpt", tmp_path / "w.pt", "--to", "torch")
    assert (
        torch.load(tmp_path / "w.pt", weights_only=True).keys() == load_checkpoint_dict(run / "step=8.ckpt")["state_dict"].keys()
    )
    main(["ckpt", "convert", str(run / "step=8.ckpt"), str(tmp_path / "w.pt"), "--to", "torch"])
    assert "exists; give another path" in capsys.readouterr().err

    of_torch = json.loads(ckpt("show", tmp_path / "w.pt", "--json"))
    assert [one["name"] for one in of_torch["arrays"]] == [*torch.load(tmp_path / "w.pt")] and not of_torch["facts"]
    assert "intact" in ckpt("verify", tmp_path / "w.pt")

    for arguments, said in (
        (("ls", tmp_path / "nowhere"), "no directory at"),
        (("prune", tmp_path / "nowhere", "--last", 1), "no directory at"),
        (("prune", run), "give --last, --best with --monitor"),
        (("prune", run, "--best", 1), "--best and --monitor go together"),
        (("show", tmp_path / "none.pt"), "no checkpoint at"),
    ):
        assert main(["ckpt", *map(str, arguments)]) == 1
        assert said in capsys.readouterr().err
    (run / "last.ckpt").symlink_to("step=8.ckpt")
    assert [one["link"] for one in json.loads(ckpt("ls", run, "--json"))][:2] == ["last.ckpt", ""]
    (run / "last.ckpt").unlink()

    would = json.loads(ckpt("prune", run, "--best", 1, "--monitor", "loss", "--every-n-steps", 4, "--dry-run", "--json"))
    best = min(listed, key=lambda one: one["metrics"]["loss"])["step"]
    assert {Path(path).name for path in would} == {f"step={step}.ckpt" for step in {2, 6} - {best}}


def test_retention_rules_and_the_last_complete_one(tmp_path):
    for step in range(1, 7):
        facts = {"step": step, "metrics": {"loss": float("nan") if step in (2, 4) else abs(step - 3)}}
        checkpoint.save(tmp_path / f"{step}.ckpt", {"x": np.zeros(2)}, facts=facts, wait=True)
    (tmp_path / "last.ckpt").symlink_to("2.ckpt")
    (next((tmp_path / "6.ckpt").glob("payload-*")) / "manifest.json").write_text("{}")
    found = checkpoint.entries(tmp_path)
    assert [entry.path.name for entry in found] == [f"{step}.ckpt" for step in (6, 5, 4, 3, 2, 1)] and found[0].problem
    policy = checkpoint.Retention(best=1, monitor="loss")
    removed = checkpoint.prune(tmp_path, policy)
    # 5 is the newest complete one, 3 the best, last.ckpt leads to 2; 6 is damaged, and not ours to remove.
    assert [path.name for path in removed] == ["1.ckpt", "4.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.ckpt", "3.ckpt", "5.ckpt", "6.ckpt", "last.ckpt"]
    assert checkpoint.prune(tmp_path, checkpoint.Retention(younger_than_s=3600)) == []
    for wrong in ({}, {"last": 0}, {"best": 1}, {"best": 1, "monitor": "x", "mode": "up"}):
        with pytest.raises(ValueError, match="Retention"):
            checkpoint.Retention(**wrong)


def test_a_stock_layout_goes_into_a_directory_and_back(run, tmp_path):
    formats.to_lightning(run / "step=6.ckpt", tmp_path / "stock.ckpt")
    formats.to_directory(tmp_path / "stock.ckpt", tmp_path / "back.ckpt")
    opened = checkpoint.open_checkpoint(tmp_path / "back.ckpt")
    names = opened.array_metadata()
    assert opened.facts["step"] == 6 and opened.facts["metrics"]["loss"] > 0
    assert {"state_dict/model.0.weight", "optimizer_states/0/state/0/exp_avg"} <= names.keys()
    one, other = (load_checkpoint_dict(tmp_path / name) for name in ("stock.ckpt", "back.ckpt"))
    assert not stock_loops.is_ours(other["loops"]) and one["loops"] == other["loops"] and one["epoch"] == other["epoch"] == 1
    for name, value in one["state_dict"].items():
        assert torch.equal(other["state_dict"][name], value) and other["state_dict"][name].dtype == value.dtype
    torch.testing.assert_close(other["optimizer_states"], one["optimizer_states"], rtol=0, atol=0)


STOCK = """
    import sys
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Model(pl.LightningModule):
        def __init__(self, hidden=16):
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(3, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch_idx)
            return self.model(batch[0]).pow(2).mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    module = Model()
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False)
    data = DataLoader(TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1))), 32)
    trainer.fit(module, data, ckpt_path=sys.argv[1])
    torch.save(module.state_dict(), sys.argv[2])
    print("finished", trainer.current_epoch, trainer.global_step, module.seen)
"""


@pytest.mark.slow
@pytest.mark.parity
def test_stock_lightning_continues_our_run(tmp_path):
    """A run of ours over 2 epochs, the third under stock: the weights of three epochs of ours."""

    class Wide(Model):
        pass

    def ours(epochs: int, folder: Path, **options):
        torch.manual_seed(0)
        module = Wide()
        callback = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        trainer = pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=[callback],
            enable_model_summary=False,
        )  # fmt: skip
        data = DataLoader(TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1))), 32)
        trainer.fit(module, data, **options)
        return module

    straight = ours(3, tmp_path / "straight").state_dict()
    ours(2, tmp_path / "two")
    formats.to_lightning(tmp_path / "two" / "epoch=1.ckpt", tmp_path / "stock.ckpt")
    command = ["-c", textwrap.dedent(STOCK), str(tmp_path / "stock.ckpt"), str(tmp_path / "weights.pt")]
    done = warm.run(warm.STOCK, command, env=os.environ, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "finished 3 3 [0]" in done.stdout
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), dict(straight), rtol=1e-5, atol=1e-6)
