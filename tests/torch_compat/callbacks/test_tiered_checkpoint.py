"""TieredCheckpoint: several rules of retention at once; durable copies, from which a run on a new machine continues."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import torch_compat as pl
from tests.torch_compat.callbacks import fit_script
from torch_compat.callbacks import TieredCheckpoint
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.checkpoint import CheckpointError, Retention, durable, entries, verify


def fit(root: Path, callback: TieredCheckpoint, epochs: int = 2, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    run = fit_script.trainer(pl, str(root), [callback], max_epochs=epochs)
    module = fit_script.make_module(pl)
    run.fit(module, fit_script.loader(8), fit_script.loader(4), **options)
    return run, {name: value.clone() for name, value in module.state_dict().items()}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def steps(directory: Path) -> set[int]:
    return {int((entry.facts or {})["step"]) for entry in entries(directory) if entry.path.name != "last.ckpt"}


def test_every_rule_keeps_and_the_rest_goes(tmp_path: Path) -> None:
    rules = Retention(last=2, every_n_steps=3)
    callback = TieredCheckpoint(tmp_path / "fast", every_n_train_steps=1, save_last=True, retention=rules)
    fit(tmp_path, callback, epochs=1)
    assert steps(tmp_path / "fast") == {3, 6, 7, 8}
    assert "last.ckpt" in names(tmp_path / "fast")
    assert [Path(path).name for path in callback.state_dict()["saved"]] == [f"epoch=0-step={n}.ckpt" for n in (3, 6, 7, 8)]


def test_the_best_by_a_metric_stay(tmp_path: Path) -> None:
    rules = Retention(best=2, monitor="val_loss")
    callback = TieredCheckpoint(tmp_path / "fast", monitor="val_loss", retention=rules)
    fit(tmp_path, callback, epochs=4)
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    assert callback.best_model_path in scores and len(names(tmp_path / "fast")) in (2, 3)
    best = min(scores, key=lambda path: scores[path])
    assert best == callback.best_model_path and Path(best).is_file()


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_run_on_a_new_machine_continues_from_the_durable_copy(tmp_path: Path, kind: str) -> None:
    _, expected = fit(tmp_path / "whole", TieredCheckpoint(every_n_train_steps=3))
    url = f"file://{tmp_path}/durable" if kind == "file" else f"memory://{tmp_path.name}/durable"

    def tiered() -> TieredCheckpoint:
        return TieredCheckpoint(
            tmp_path / "fast", every_n_train_steps=3, durable_dirpath=url, durable_retention=Retention(every_n_steps=6, last=1)
        )

    fit(tmp_path, tiered(), epochs=1)
    files, root = fsspec.core.url_to_fs(url)
    assert names(tmp_path / "fast") == {"epoch=0-step=6.ckpt"}
    shutil.rmtree(tmp_path / "fast")
    files.makedirs(f"{root}/half.ckpt/payload-{'0' * 32}")
    files.pipe_file(f"{root}/half.ckpt/payload-{'0' * 32}/manifest.json", b"a copy that was killed")
    run, weights = fit(tmp_path, tiered(), ckpt_path="auto")
    assert Path(run.ckpt_path).name == "epoch=0-step=6.ckpt"
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert {Path(str(path)).name for path in files.ls(root, detail=False)} == {
        "epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt", "epoch=1-step=15.ckpt", "half.ckpt",
    }  # fmt: skip
    if kind == "file":
        assert verify(tmp_path / "durable" / "epoch=1-step=15.ckpt").intact
    copies = durable.DurableCopies(url)
    copies.remove("epoch=1-step=15.ckpt")
    copies.remove("epoch=1-step=12.ckpt")
    copies.remove("epoch=0-step=6.ckpt")  # the only one that is left
    copies.wait()
    assert set(copies.records()) == {"epoch=0-step=6.ckpt"}


def test_a_copy_that_fails_is_tried_again_and_told_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "durable").write_text("no directory")  # a mount that is gone
    callback = TieredCheckpoint(tmp_path / "fast", every_n_train_steps=8, durable_dirpath=tmp_path / "durable")
    with pytest.raises(CheckpointError, match=r"not copied to .*durable: .*step=16\.ckpt: \w+Error.*are intact"):
        fit(tmp_path, callback)
    assert verify(tmp_path / "fast" / "epoch=1-step=16.ckpt").intact
    (tmp_path / "durable").unlink()  # it is back
    callback.copy_durably(str(tmp_path / "fast" / "epoch=1-step=16.ckpt"))
    assert names(tmp_path / "durable") == {"epoch=1-step=16.ckpt"}

    copies = durable.DurableCopies(tmp_path / "durable")
    copy = tmp_path / "durable" / "epoch=1-step=16.ckpt"
    copy.unlink()
    copy.symlink_to(copy)  # reading it is an error, but not that there is none
    with pytest.raises(OSError, match="symbolic links"):
        copies.newest()
    copies.remove("epoch=1-step=16.ckpt")
    copies.wait()  # what cannot be removed costs space at most


def test_training_does_not_wait_for_a_slow_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, real = threading.Event(), durable.DurableCopies._copied
    copied = []

    def hold(self: Any, path: Path) -> bool:
        assert may_copy.wait(300)
        copied.append(path.name)
        return real(self, path)

    class Release(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 12:
                assert not copied
                may_copy.set()

    monkeypatch.setattr(durable.DurableCopies, "_copied", hold)
    callback = TieredCheckpoint(tmp_path / "fast", every_n_train_steps=4, durable_dirpath=tmp_path / "durable")
    run = fit_script.trainer(pl, str(tmp_path), [Release(), callback], max_epochs=2)
    run.fit(fit_script.make_module(pl), fit_script.loader(8), fit_script.loader(4))
    assert len(copied) == 4
    assert names(tmp_path / "durable") == {"epoch=1-step=16.ckpt"} == names(tmp_path / "fast"), "removals are followed"


def test_arguments() -> None:
    rules = Retention(best=2, monitor="loss")
    for make, message in (
        (lambda: TieredCheckpoint(save_top_k=3, monitor="loss", retention=rules), r"save_top_k=3, retention=.*Retention\(best=3"),
        (lambda: TieredCheckpoint(monitor="other", retention=rules), r"monitor='other', retention=Retention\(monitor='loss'"),
        (lambda: TieredCheckpoint(durable_retention=rules), "needs durable_dirpath"),
    ):
        with pytest.raises(MisconfigurationException, match=message):
            make()
