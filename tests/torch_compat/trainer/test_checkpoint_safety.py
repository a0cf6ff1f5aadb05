"""Harm that comes to checkpoints of runs: forged files, storage that is lost, Ctrl-C while one is being written."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_compat as pl
from tests.torch_compat.callbacks import fit_script
from torch_compat.callbacks import Callback, ModelCheckpoint
from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict
from torch_compat.plugins.io import TorchCheckpointIO
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain import checkpoint
from xlatrain.cli import main as cli

ROOT = Path(__file__).parents[3]


def fit(root: Path, callbacks: list[Any], epochs: int = 1, **options: Any) -> Any:
    run = fit_script.trainer(pl, str(root), callbacks, max_epochs=epochs)
    module = fit_script.make_module(pl)
    run.fit(module, fit_script.loader(4), **options)
    return module


def pickled(owned: Path) -> list[bytes]:
    """Files that create ``owned`` when they are unpickled: as ``torch.save`` writes them, and bare."""

    class Attack:
        def __reduce__(self) -> Any:
            return (pathlib.Path.touch, (owned,))

    stream = io.BytesIO()
    torch.save({"state_dict": {}, "x": Attack()}, stream)
    return [stream.getvalue(), pickle.dumps({"x": Attack()})]


@pytest.mark.parametrize("form", [0, 1])
def test_a_forged_checkpoint_runs_no_code(tmp_path: Path, form: int, capsys: pytest.CaptureFixture[str]) -> None:
    owned = tmp_path / "owned"
    evil, path, file = pickled(owned)[form], tmp_path / "forged.ckpt", tmp_path / "stock.ckpt"
    checkpoint.save(
        path, {"state_dict/layer.weight": np.ones((1, 4), np.float32)}, {"host.pt": evil, "trusted.pt": evil}, wait=True
    )
    file.write_bytes(evil)
    uses: list[Callable[[Any], Any]] = [
        load_checkpoint_dict,
        lambda source: fit(tmp_path, [], ckpt_path=str(source)),
        lambda source: type(fit_script.make_module(pl)).load_from_checkpoint(source),
        lambda source: cli(["ckpt", "show", str(source)]),
        lambda source: cli(["ckpt", "verify", str(source)]),
        lambda source: cli(["ckpt", "ls", str(source.parent)]),
        *(
            lambda source, to=to: cli(["ckpt", "convert", str(source), str(tmp_path / f"to-{to}"), "--to", to])
            for to in ("safetensors", "torch", "lightning", "directory")
        ),
    ]
    refused = 0
    for source in (path, file):
        for use in uses:
            try:
                use(source)
            except (Exception, SystemExit):
                refused += 1
            assert not owned.exists()
    assert refused >= 6  # whoever needs what is in it cannot have it
    capsys.readouterr()
    with pytest.raises(Exception):  # noqa: B017  (it is no checkpoint, whatever else it does)
        fit(tmp_path, [], ckpt_path=str(file), weights_only=False)
    assert owned.exists()  # the test could fail: trusted, it runs


def test_a_run_whose_storage_is_lost_ends_with_the_reason_and_continues_later(tmp_path: Path) -> None:
    directory, away = tmp_path / "checkpoints", tmp_path / "away"
    whole = fit(tmp_path / "whole", [], epochs=2)

    class Unmount(Callback):
        """A mounted directory that is none any more (as root one may write into directories without permission)."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                trainer.strategy.pending_save.wait()
                directory.rename(away)
                directory.write_bytes(b"")

    saving = ModelCheckpoint(directory, every_n_train_steps=2)
    module = fit_script.make_module(pl)
    run = fit_script.trainer(pl, str(tmp_path), [Unmount(), saving], max_epochs=2)
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot save to .*step=4\.ckpt: Not a directory.*intact"):
        run.fit(module, fit_script.loader(4))
    assert run.global_step == 4 and all(torch.isfinite(value).all() for value in module.state_dict().values())
    directory.unlink()
    away.rename(directory)
    (kept,) = checkpoint.entries(directory)
    assert kept.path.name == "epoch=0-step=2.ckpt" and checkpoint.verify(kept.path).intact
    continued = fit(tmp_path, [ModelCheckpoint(directory, every_n_train_steps=2)], epochs=2, ckpt_path="auto")
    for name, value in whole.state_dict().items():
        assert torch.equal(continued.state_dict()[name], value), name


@pytest.mark.slow
def test_an_interrupt_while_a_checkpoint_is_written_leaves_a_whole_one(tmp_path: Path) -> None:
    program = """
        import os, signal, sys, torch
        import torch_compat as pl
        from torch_compat.callbacks import ModelCheckpoint

        class Net(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2000, 2000)  # so large a file is written in the background

            def training_step(self, batch, _):
                return self.layer(batch).square().mean()

            def on_train_batch_start(self, batch, batch_idx):
                pending = self.trainer.strategy.pending_save
                if batch_idx == 2 and pending is not None:
                    print("INTERRUPT", "writing" if not pending.done() else "written", flush=True)
                    os.kill(os.getpid(), signal.SIGINT)

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters())

        trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=sys.argv[1], logger=False,
            enable_progress_bar=False, callbacks=[ModelCheckpoint(every_n_train_steps=2, filename="saved")])
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(64, 2000), 2))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "INTERRUPT" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    (entry,) = checkpoint.entries(tmp_path / "checkpoints")
    assert checkpoint.verify(entry.path).intact and (entry.facts or {})["step"] == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["saved.ckpt"]  # nothing half is left beside it


def test_a_checkpoint_of_one_file_resumes_without_trust_from_any_url(tmp_path: Path) -> None:
    url, one_file = f"memory://{tmp_path.name}/one.ckpt", TorchCheckpointIO()
    run = fit_script.trainer(pl, str(tmp_path), [], max_epochs=1, plugins=[one_file])
    run.fit(fit_script.make_module(pl), fit_script.loader(4))
    run.save_checkpoint(url)
    whole, continued = fit(tmp_path, [], epochs=2), fit(tmp_path, [], epochs=2, ckpt_path=url)
    for name, value in whole.state_dict().items():
        assert torch.equal(continued.state_dict()[name], value), name


def test_paths_that_lead_to_nothing_are_named(tmp_path: Path) -> None:
    run = fit_script.trainer(pl, str(tmp_path), [ModelCheckpoint(tmp_path / "c")], max_epochs=1)
    module, data = fit_script.make_module(pl), fit_script.loader(1)
    for path, error, said in (
        (str(tmp_path / "no.ckpt"), FileNotFoundError, "Checkpoint file not found: .*no.ckpt.*'auto'.*xlatrain ckpt ls"),
        ("hpc", ValueError, "no complete hpc_ckpt_<n>.ckpt in"),
        ("best", ValueError, "has saved nothing yet"),
        ("registry:team/model", ValueError, "not supported; download"),
    ):
        with pytest.raises(error, match=said):
            run.fit(module, data, ckpt_path=path)
    run.fit(module, data, ckpt_path="last")
    run.save_checkpoint(tmp_path / "hpc_ckpt_3.ckpt")
    run.save_checkpoint(tmp_path / "hpc_ckpt_12.ckpt")
    run.validate(module, data, ckpt_path="hpc", verbose=False)
    assert run.ckpt_path == str(tmp_path / "hpc_ckpt_12.ckpt")


def write_garbage(path: Path) -> None:
    path.write_bytes(b"garbage!")


def write_json(path: Path) -> None:
    path.write_text(json.dumps({"a": 1}))


def write_half(path: Path) -> None:
    torch.save({"state_dict": {"layer.weight": torch.ones(4, 4)}}, path)
    path.write_bytes(path.read_bytes()[:-100])


def write_weights(path: Path) -> None:
    torch.save({"layer.weight": torch.ones(1, 4)}, path)


@pytest.mark.parametrize(
    ("write", "error", "said"),
    [
        (Path.touch, EOFError, "x.ckpt' cannot be read as a checkpoint .*found 0 bytes"),
        (write_garbage, pickle.UnpicklingError, "found a text of 8 bytes that begins with 'garbage!'. Pass the path"),
        (
            write_json,
            pickle.UnpicklingError,
            r"\(UnpicklingError: Unsupported operand 123\): .*begins with '{\"a\": 1}'",
        ),
        (write_half, RuntimeError, "x.ckpt' cannot be read as a checkpoint .*Copy it again"),
        (write_weights, KeyError, "has no 'state_dict', only 'layer.weight'.*load_state_dict"),
        (Path.mkdir, FileNotFoundError, "x.ckpt: the directory is empty; .*xlatrain ckpt ls"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, write: Callable[[Path], Any], error: type[Exception], said: str) -> None:
    path = tmp_path / "x.ckpt"
    write(path)
    module = fit_script.make_module(pl)
    with pytest.raises(error, match=said):
        fit_script.trainer(pl, str(tmp_path), [], max_epochs=1).fit(module, fit_script.loader(1), ckpt_path=path)
    with pytest.raises(error, match=said):
        type(module).load_from_checkpoint(path)


def test_a_file_that_is_no_checkpoint_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_garbage(tmp_path / "x.ckpt")
    for trusted in ([], ["--trusted"]):
        assert cli(["ckpt", "convert", str(tmp_path / "x.ckpt"), str(tmp_path / "y"), "--to", "directory", *trusted]) == 1
        assert "x.ckpt cannot be read as a checkpoint" in capsys.readouterr().err


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run = fit_script.trainer(pl, str(tmp_path), [], max_epochs=1)
    run.fit(fit_script.make_module(pl), fit_script.loader(4))
    run.save_checkpoint(tmp_path / "sgd.ckpt")
    module = fit_script.make_module(pl)
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters())
    run = fit_script.trainer(pl, str(tmp_path), [], max_epochs=2)
    with pytest.raises(MisconfigurationException, match=r"optimizer 0 .* is Adam, .* momentum, nesterov and not amsgrad"):
        run.fit(module, fit_script.loader(4), ckpt_path=tmp_path / "sgd.ckpt")


def test_a_directory_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = fit_script.trainer(pl, str(tmp_path), [ModelCheckpoint(tmp_path / "file" / "c")], max_epochs=1)
    warned = pytest.warns(UserWarning, match=r"No checkpoint can be saved in .*, because of .*file: it is no directory")
    with warned, pytest.raises(checkpoint.CheckpointError, match="cannot save to"):
        run.fit(fit_script.make_module(pl), fit_script.loader(1))
    free = fit_script.trainer(pl, str(tmp_path), [ModelCheckpoint(tmp_path / "new" / "c")], max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="No checkpoint can be saved")
        free.fit(fit_script.make_module(pl), fit_script.loader(1))
