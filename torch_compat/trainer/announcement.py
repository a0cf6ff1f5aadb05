"""Announcement of a run: the line that says, after its first step, how its steps run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_compat.run.states import TrainerFn
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning
from xlatrain.mesh.mesh import in_words

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_EAGER_PAGE = "docs/why_eager.md"


def announce(trainer: Trainer) -> None:
    """Say once in a run how its steps run: compiled, for which mesh, and how long the first took; or why not.

    A run that says the same as the Trainer's last one, as the trials of a tuner do, says nothing.
    """
    trainer.run_time.announced = True
    steps, fn = trainer.executor.steps, trainer.state.fn
    assert steps is not None and fn is not None
    what = "training" if fn == TrainerFn.FITTING else fn.value
    text = f"{what}: {steps.log.how(steps.executor)} · {in_words(trainer.strategy.mesh)}"
    if steps.log.fallback:
        text = f"{what}: EAGER on the host, not compiled · {steps.log.short_reason} · {_EAGER_PAGE}"
    if text == trainer._announced:
        return
    trainer._announced = text
    seconds = steps.log.seconds - trainer.run_time.compiled_before
    took = f" · first step in {seconds:.1f} s" if seconds and not steps.log.fallback else ""
    bar = trainer.progress_bar_callback
    (rank_zero_info if bar is None else bar.announce)(text + took)


def warn_of_eval_mode(module: torch.nn.Module) -> None:
    """Warn of modules that training finds in eval mode."""
    found = sum(not one.training for one in module.modules())
    if found:
        rank_zero_warn(
            f"Found {found} module(s) in eval mode at the start of training. This leaves them without dropout and with "
            "BatchNorm's running statistics. `model.train()` before `fit` puts all into train mode.",
            category=PossibleUserWarning,
        )
