"""What is in a checkpoint, under stock Lightning and here: keys and their order, types, every counter of every loop."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_compat as pl
from tests import warm
from tests.torch_compat.trainer import checkpoint_contents
from tests.torch_compat.trainer.checkpoint_contents import MOMENTS, case, contents

SEEDS = len(MOMENTS)
"""One run for each moment of saving. Others: ``python tests/torch_compat/trainer/checkpoint_contents.py FIRST LAST FILE``."""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("stock") / "contents.json"
    command = [str(Path(checkpoint_contents.__file__)), "0", str(SEEDS), str(file)]
    done = warm.run(warm.STOCK, command, env=os.environ, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS), ids=lambda seed: case(seed)["moment"])
def test_a_checkpoint_holds_what_stocks_holds(seed: int, stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")  # counters are the loop's
    (found,) = contents(pl, seed, seed + 1).values()
    expected = stock[str(seed)]
    assert found["error"] == expected["error"] and list(found["files"]) == list(expected["files"])
    for name, (keys, content) in expected["files"].items():
        assert found["files"][name][0] == keys
        assert found["files"][name][1] == content, (name, case(seed))


def test_hooks_see_what_stocks_see_and_a_checkpoint_without_loops_resumes(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Model(checkpoint_contents.modules_of(pl)[0]):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.append(list(checkpoint))

    def trainer(epochs: int) -> pl.Trainer:
        return pl.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    settings = {**case(0), "manual": False, "optimizers": 1, "scheduler": None, "hparams": False, "skips": False}
    data = checkpoint_contents.modules_of(pl)[1](2, False)
    run = trainer(1)
    run.fit(Model(settings), data.train_dataloader())
    run.save_checkpoint(tmp_path / "a.ckpt")
    stocks = ["epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"]
    assert seen == [[*stocks, "optimizer_states", "lr_schedulers"]]
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content.keys() - seen[0] == {"xlatrain"}
    del content["loops"], content["xlatrain"]
    torch.save(content, tmp_path / "bare.ckpt")
    again = trainer(1)
    again.fit(Model(settings), data.train_dataloader(), ckpt_path=tmp_path / "bare.ckpt")
    assert again.global_step == 2  # the loops begin anew, as in stock; the optimizer goes on
    for key, said in (("optimizer_states", "optimizer"), ("lr_schedulers", "learning rate scheduler")):
        torch.save({name: value for name, value in content.items() if name != key}, tmp_path / "weights.ckpt")
        with pytest.raises(KeyError, match=f"Trying to restore {said} state but checkpoint contains only the model"):
            trainer(1).fit(Model(settings), data.train_dataloader(), ckpt_path=tmp_path / "weights.ckpt")
