"""Frames between the loop and a batch's program, and between the loop and the user's step while that is captured."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import torch_compat
import xlatrain
from torch_compat import LightningModule, Trainer
from torch_compat.step.mesh_step_runner import MeshStepRunner
from xlatrain.xla.compilation_cache import first_run

PACKAGES = tuple(f"{Path(package.__file__).parent}/" for package in (torch_compat, xlatrain) if package.__file__)
TO_THE_PROGRAM = 6
TO_THE_STEP = 20


def frames_since(function: str, frame: FrameType | None) -> list[str]:
    """The frames of both packages, and ``frame``, that were entered since ``function`` was, itself included; none without it."""
    found = [] if frame is None else [frame.f_code.co_qualname]
    while frame is not None and (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.startswith(PACKAGES):
            found.append(frame.f_code.co_qualname)
            if frame.f_code.co_name == function:
                return found[::-1]
    return []


class Net(LightningModule):
    """A net of one layer.

    Args:
        by_hand: with manual optimization.
    """

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.automatic_optimization = not by_hand

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self.layer(batch[0]).mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_batch_is_few_frames_away_from_its_program_and_its_step(by_hand: bool, tmp_path: Path) -> None:
    to_the_program: list[list[str]] = []
    to_the_step: list[list[str]] = []

    def follow(frame: FrameType, event: str, _: Any) -> None:  # not in the step, of whose effects a list would be one
        if event == "call" and frame.f_code is first_run.__code__:
            to_the_program.append(frames_since("_run_batch", frame.f_back))
        if event == "call" and frame.f_code is Net.training_step.__code__:
            to_the_step.append(frames_since("_run_batch", frame))

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", devices=1, **options)
    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        trainer.fit(Net(by_hand), DataLoader(TensorDataset(torch.ones(6, 2)), 2))
    finally:
        sys.setprofile(before)
    assert isinstance(trainer.executor.steps, MeshStepRunner)
    assert to_the_program and to_the_step
    for frames in to_the_program:
        assert 0 < len(frames) <= TO_THE_PROGRAM, frames
    for frames in to_the_step:
        audits = any("audit" in name for name in frames)
        assert 0 < len(frames) <= TO_THE_STEP + 2 * audits, "\n".join(frames)
