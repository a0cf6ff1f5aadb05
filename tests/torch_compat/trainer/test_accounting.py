"""A fit says where its time went: in the run report, and in the ledger, over restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_compat as pl
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.run import report
from xlatrain.cli import main
from xlatrain.cluster.watch.ledger import read


class Stops(BoringModel):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 5:
            raise RuntimeError("stop here")


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu", "devices": 1}
    return pl.Trainer(default_root_dir=folder, max_epochs=1, limit_train_batches=8, limit_val_batches=1, **quiet, **options)


def test_the_time_of_a_fit_and_of_one_that_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, written = tmp_path / "ledger.jsonl", tmp_path / "report.json"
    monkeypatch.setenv("XLATRAIN_LEDGER", str(ledger))
    monkeypatch.setenv("XLATRAIN_REPORT", str(written))
    monkeypatch.setattr(report, "_runs", [])
    monkeypatch.setattr("torch_compat.trainer.accounting._fits", 0)  # as in a process that has fitted nothing yet
    torch.manual_seed(0)
    every_second_step = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(RuntimeError, match="stop here"):
        trainer(tmp_path, callbacks=[every_second_step]).fit(Stops())
    [begin, end] = read(ledger)
    assert (begin["event"], begin["step"]) == ("begin", 0)
    assert (end["event"], end["step"], end["outcome"]) == ("end", 5, "ended by RuntimeError")
    assert all(end["seconds"][kind] > 0 for kind in ("setup", "compile", "data_wait", "step", "validation", "save"))
    assert sum(end["seconds"].values()) == pytest.approx(end["time"] - begin["time"], abs=0.05)

    # The same fit, in what would be another process: from the checkpoint of step 4.
    monkeypatch.setattr("torch_compat.trainer.accounting._fits", 0)
    saved = next((tmp_path / "c").glob("*step=4.ckpt"))
    trainer(tmp_path, enable_checkpointing=False).fit(BoringModel(), ckpt_path=str(saved))
    text = ledger.read_text().splitlines()
    ledger.write_text("\n".join([*text[:2], *(line.replace('"pid": ', '"pid": 1') for line in text[2:])]) + "\n")
    assert main(["goodput", str(ledger), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["steps"], found["lost_steps"], found["runs"]) == (8, 1, 2)
    assert found["seconds"]["lost"] > 0
    assert 0 < found["goodput"] < 1

    failed, finished = json.loads(written.read_text())["runs"]
    for run in (failed, finished):
        assert 0 < run["goodput"] < 1
        assert run["seconds"]["compile"] == pytest.approx(run["compile_s"], rel=0.1, abs=0.02)


def test_a_report_that_cannot_be_written_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    module = BoringModel()
    for path in (tmp_path / "file" / "report.json", tmp_path):
        monkeypatch.setenv("XLATRAIN_REPORT", str(path))
        with pytest.raises(OSError, match=f"XLATRAIN_REPORT='{path}': the run report cannot be written"):
            trainer(tmp_path, enable_checkpointing=False).fit(module)


def test_a_memory_limit_that_is_no_number_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_HOST_MEMORY", "4GB")
    run = trainer(tmp_path, enable_checkpointing=False)
    with pytest.raises(ValueError, match="XLATRAIN_HOST_MEMORY='4GB'; expected a number of bytes"):
        run.fit(BoringModel())
    assert run.global_step == 0
