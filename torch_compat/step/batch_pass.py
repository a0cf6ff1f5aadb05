"""A pass over batches, as the steps of the moment want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader

from torch_compat.run import hook_calls as call
from torch_compat.step.run_context import RunContext
from torch_compat.step.step_runner import StepRunner


def may_change_batches(run: RunContext, loaders: Sequence[Any]) -> bool:
    """Whether a batch may be overwritten while its step still runs: by a loader that reuses memory, or by a user's hook."""
    if any(not isinstance(one, DataLoader) or one.batch_sampler is None for one in loaders):
        return True
    own = [callback for callback in run.callbacks if not type(callback).__module__.startswith("torch_compat.")]
    hooks = [f"on_{stage}_batch_end" for stage in ("train", "validation", "test", "predict")]
    return any(call.has_own(hook, owner) for hook in hooks for owner in (run.lightning_module, *own))


def pass_over(batches: Iterator[Any], runner: Callable[[], StepRunner]) -> Iterator[Any]:
    """``batches`` as the steps want them, whose ``runner`` may be another while they are taken."""
    steps, own = None, batches
    while True:
        if (now := runner()) is not steps:
            steps, own = now, now.loaded(batches)
        batch = next(own, _END)
        if batch is _END:
            return
        yield batch


_END = object()
