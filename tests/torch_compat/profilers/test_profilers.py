"""Profilers: what is recorded of a run, reports, and the refused ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_compat import LightningDataModule, Trainer
from torch_compat.demos import BoringModel
from torch_compat.profilers import AdvancedProfiler, PassThroughProfiler, PyTorchProfiler, SimpleProfiler, XLAProfiler
from torch_compat.utilities.exceptions import MisconfigurationException


class Marking(BoringModel):
    """Has a hook with an action of its own."""

    def on_train_batch_end(self, *args: object) -> None:
        with self.trainer.profiler.profile("mine"):
            pass


def fit(profiler: object, root: Path, **options: object) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=6,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **options,
    )
    trainer.fit(Marking())
    return trainer


def test_simple_profiler_counts_actions_and_writes_a_report(tmp_path: Path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="report")
    trainer = fit(profiler, tmp_path)
    counts = {name: len(durations) for name, durations in profiler.recorded_durations.items()}
    strategy = f"[Strategy]{type(trainer.strategy).__name__}"
    assert counts["run_training_epoch"] == 1
    assert counts["run_training_batch"] == counts[f"{strategy}.training_step"] == counts["mine"] == 6
    assert counts["[_TrainingEpochLoop].train_dataloader_next"] == 6
    assert counts[f"{strategy}.validation_step"] == counts["[_EvaluationLoop].val_next"] == 2
    assert counts["[LightningModule]Marking.on_train_batch_end"] == 6
    assert counts["[LightningModule]Marking.train_dataloader"] == 1
    report = (tmp_path / "fit-report.txt").read_text()
    assert "FIT Profiler Report" in report
    assert "Num calls" in report and "|  run_training_epoch" in report


def test_hooks_of_data_and_saves_are_recorded_under_stocks_names(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        def prepare_data(self) -> None: ...

        def train_dataloader(self) -> object:
            return BoringModel().train_dataloader()

        def state_dict(self) -> dict[str, int]:
            return {"seen": 1}

    profiler = SimpleProfiler()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, profiler=profiler, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Marking(), datamodule=Data())
    hooks = {f"[LightningDataModule]Data.{hook}" for hook in ("prepare_data", "train_dataloader", "state_dict")}
    assert {*hooks, "save_checkpoint"} <= profiler.recorded_durations.keys()


def test_advanced_profiler_with_nested_actions(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="calls", line_count_restriction=5, dump_stats=True)
    fit(profiler, tmp_path)
    report = (tmp_path / "fit-calls.txt").read_text()
    assert "Profile stats for: run_training_batch" in report
    assert (tmp_path / "fit-calls-run_training_epoch.prof").exists()
    assert profiler.profiled_actions == {}


def test_xla_profiler_traces_a_window_of_steps(tmp_path: Path) -> None:
    fit(XLAProfiler(port=None, dirpath=tmp_path, first_step=3, steps=2, perfetto=True), tmp_path)
    (run,) = (tmp_path / "plugins" / "profile").iterdir()
    assert [path.name for path in run.glob("*.xplane.pb")]
    assert (run / "perfetto_trace.json.gz").exists()


def test_an_exception_ends_the_trace(tmp_path: Path) -> None:
    profiler = XLAProfiler(port=None, dirpath=tmp_path, first_step=0, steps=100)
    profiler.setup("fit")
    with pytest.raises(KeyError), profiler.profile("run_training_batch"):
        raise KeyError("the user's own")
    profiler.teardown("fit")
    assert list((tmp_path / "plugins" / "profile").iterdir())
    with pytest.raises(ValueError, match="was never started"):
        profiler.stop("run_training_batch")


def test_simple_profiler_wants_starts_and_stops_in_pairs() -> None:
    profiler = SimpleProfiler()
    profiler.start("a")
    with pytest.raises(ValueError, match="already started"):
        profiler.start("a")
    profiler.stop("a")
    with pytest.raises(ValueError, match="was never started"):
        profiler.stop("a")
    assert "Mean duration" in profiler.summary()


def test_profilers_by_name_and_refused_ones(tmp_path: Path) -> None:
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "default_root_dir": tmp_path}
    assert isinstance(Trainer(**options).profiler, PassThroughProfiler)
    assert isinstance(Trainer(profiler="Simple", **options).profiler, SimpleProfiler)
    with pytest.raises(MisconfigurationException, match="profiler='xla'"):
        PyTorchProfiler()
    with pytest.raises(MisconfigurationException, match=r"torch\.profiler sees no operator"):
        Trainer(profiler="pytorch", **options)
    with pytest.raises(ValueError, match="at least 0"):
        XLAProfiler(steps=-1)


def test_a_second_profiler_server_is_not_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has one of a process."""
    monkeypatch.setattr("torch_compat.profilers.xla._servers", {9012: object()})
    with pytest.warns(UserWarning, match=r"port=9013.*at port 9012"):
        XLAProfiler(port=9013, dirpath=tmp_path).setup("fit")
