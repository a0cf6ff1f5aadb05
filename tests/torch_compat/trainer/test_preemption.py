"""SIGTERM at any point of a fit: saved, the documented status, and continued to the weights of the undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_compat import Callback, LightningModule, Trainer
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.trainer import preemption
from xlatrain import checkpoint


class Data(Dataset):
    """``slow_at`` makes that access wait, as a loader that hangs does."""

    def __init__(self, slow_at: int | None = None) -> None:
        self.slow_at, self.reads = slow_at, 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        if self.reads == self.slow_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(300)
            raise AssertionError("the slow loader was waited for")
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Sigterm(Callback):
    def __init__(self, count: int) -> None:
        self.count = count

    def _count(self, trainer: Trainer, *_: object) -> None:
        if not trainer.sanity_checking:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), signal.SIGTERM)


class AtTrainBatch(Sigterm):
    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        self._count(trainer)


class AtValidationBatch(Sigterm):
    def on_validation_batch_start(self, trainer: Trainer, *_: object) -> None:
        self._count(trainer)


class AtFirstCapture(Sigterm):
    def on_train_start(self, trainer: Trainer, *_: object) -> None:
        self._count(trainer)


def run(
    folder: Path,
    callback: Callback | None = None,
    slow_at: int | None = None,
    ckpt_path: str | None = None,
    check_slow_at: int | None = None,
) -> Model:
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_epochs=2), *([callback] if callback else [])], val_check_interval=3,
    )  # fmt: skip
    module = Model()
    loader = DataLoader(Data(slow_at), 4, shuffle=True)
    validation = DataLoader(Data(check_slow_at), 4, sampler=torch.utils.data.RandomSampler(range(48)))
    trainer.fit(module, loader, validation, ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    return {name: value.clone() for name, value in run(folder).state_dict().items()}


@pytest.mark.parametrize(
    ("interruption", "slow_at"),
    [
        (lambda: AtFirstCapture(1), None),
        (lambda: AtTrainBatch(8), None),
        (lambda: AtValidationBatch(9), None),
        (lambda: None, 48 + 3 * 8 + 2),
    ],
    ids=["before the first compilation", "training", "validation", "waiting for the loader"],
)
def test_preempted_run_continues_exactly(tmp_path, interruption, slow_at, whole):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, interruption(), slow_at, "auto")
    assert ended.value.code == preemption.EXIT_STATUS
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    saved = {entry.path.name: entry.facts for entry in checkpoint.entries(tmp_path)}
    assert saved[preemption.NAME]["step"] >= 1
    module = run(tmp_path, ckpt_path="auto")
    assert module.trainer.ckpt_path == str(tmp_path / preemption.NAME)
    continued = module.state_dict()
    for name, value in whole.items():
        assert torch.equal(continued[name], value), name


def test_a_loader_that_hangs_while_it_is_read_again_is_interrupted(tmp_path, whole):
    with pytest.raises(SystemExit):
        run(tmp_path, AtTrainBatch(5))
    saved = checkpoint.commit_time_ns(tmp_path / preemption.NAME)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, slow_at=4, ckpt_path="auto")
    assert ended.value.code == preemption.EXIT_STATUS
    assert checkpoint.commit_time_ns(tmp_path / preemption.NAME) == saved  # there was nothing new to save
    continued = run(tmp_path, ckpt_path="auto").state_dict()
    assert all(torch.equal(continued[name], value) for name, value in whole.items())


def test_a_sanity_check_whose_loader_hangs_is_interrupted(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, check_slow_at=6)
    assert ended.value.code == preemption.EXIT_STATUS
    assert "there is nothing new to save; start the run again as it was started" in capfd.readouterr().err
    assert not checkpoint.entries(tmp_path)


def test_a_handler_of_the_script_hears_it_too(tmp_path):
    heard = []

    def handler(*_: object) -> None:
        heard.append(1)

    signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit):
            run(tmp_path, AtTrainBatch(2))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [1]
    saved = {entry.path.name: entry.facts for entry in checkpoint.entries(tmp_path)}
    assert saved[preemption.NAME]["step"] == 2


@pytest.mark.parametrize("accepts", [True, False])
def test_a_slurm_job_is_queued_again_and_continues_exactly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, torch.Tensor],
    accepts: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a stand-in for ``scontrol`` that records its call."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n' + ("" if accepts else "echo not allowed >&2\nexit 1\n"))
    scontrol.chmod(0o755)
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "train"}
    for name, value in {**job, "SLURM_STEP_NODELIST": "here", "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # default_root_dir

    class Sigusr1(Sigterm):
        def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit) as ended:
        if accepts:
            run(tmp_path / "checkpoints", Sigusr1(8))
        else:
            with pytest.warns(UserWarning, match=r"`scontrol requeue 77` failed \(not allowed\): .* submit it again"):
                run(tmp_path / "checkpoints", Sigusr1(8))
    assert ended.value.code == preemption.EXIT_STATUS
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert (tmp_path / "calls").read_text() == "requeue 77\n"
    assert "SIGUSR1: the run saves a checkpoint at the next batch boundary" in capfd.readouterr().err
    if not accepts:
        return
    (tmp_path / "hpc_ckpt_2.ckpt" / f"payload-{'0' * 32}").mkdir(parents=True)  # SLURM killed a run while it saved
    module = run(tmp_path / "checkpoints")
    assert module.trainer.ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(whole[name], value), name


@pytest.mark.timeout(300)
def test_workers_that_outlive_the_run_do_not_hold_up_its_end() -> None:
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)  # pyright: ignore[reportArgumentType]
    with preemption._notified(preemption.Preemption(), [signal.SIGTERM]):
        assert [batch.item() for batch in loader] == [0, 1, 2, 3]
    assert loader._iterator is not None
    loader._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]
