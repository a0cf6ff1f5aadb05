"""The plugins' members between the forward pass and the update, bound once per run to those that somebody overrides."""

from __future__ import annotations

from typing import Any

from torch_compat.step.run_context import RunContext
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.overrides import overridden
from xlatrain.cluster import distributed


class StrategyHooks:
    """The hooks of the strategy and the precision plugin that an optimization calls.

    Attributes:
        on_gradients: the overridden members that see gradients: with any of them the program is cut after the gradients.
        clips: whether the precision plugin (or an accelerator of 1.3) has its own clipping.
        steps: whether the strategy or the precision plugin has its own optimizer step.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        strategy, precision = run.strategy, run.precision_plugin
        self._pre_backward, self._post_backward = (strategy.overrides(name) for name in ("pre_backward", "post_backward"))
        self._before, self._after = (strategy.overrides(name) for name in ("pre_optimizer_step", "post_optimizer_step"))
        self._counts, self._stepped = (strategy.overrides(name) for name in ("update_global_step", "post_training_step"))
        own = overridden(precision, "pre_backward", "post_backward", "optimizer_step")
        self._pre_backward |= "pre_backward" in own
        self._post_backward |= "post_backward" in own
        self.steps = strategy.overrides("optimizer_step") or "optimizer_step" in own
        clipping = overridden(precision, "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value")
        self.clips = bool(run.gradient_clip_val) and (bool(clipping) or strategy.overrides("clip_gradients"))
        clears = strategy.overrides("optimizer_zero_grad")
        self.on_gradients = clears or self._pre_backward or self._post_backward or self.steps or self.clips

    def after_training_step(self) -> None:
        """Called after the module's step, before the hooks around backward where these run on the host."""
        if self._stepped:
            self._run.strategy.post_training_step()

    def pre_backward(self, loss: Any) -> None:
        """Called before the hooks around a backward pass, with the real loss."""
        if self._pre_backward:
            self._run.strategy.pre_backward(loss)

    def post_backward(self, loss: Any) -> None:
        """Called after the hooks around a backward pass; gradients can be read and changed."""
        if self._post_backward:
            self._run.strategy.post_backward(loss)

    def before_step(self, optimizer: Any) -> bool:
        """Called before a real optimizer step; returns whether the strategy has a hook there."""
        if self._before:
            self._run.strategy.pre_optimizer_step(optimizer, self._index(optimizer))
        return self._before

    def after_step(self, optimizer: Any) -> None:
        """Called after a real optimizer step."""
        if self._after:
            self._run.strategy.post_optimizer_step(optimizer, self._index(optimizer))

    def count_step(self) -> None:
        """``global_step`` moves, as the strategy says.

        Raises:
            MisconfigurationException: it says another number on another process.
        """
        progress = self._run.fit_loop.progress
        if not self._counts:
            progress.global_step += 1
            return
        counted = self._run.strategy.update_global_step(progress.total_batch, progress.global_step)
        everywhere = distributed.all_gather_object(counted)
        if len(set(everywhere)) > 1:
            raise MisconfigurationException(
                f"{type(self._run.strategy).__name__}.update_global_step must return the same number on every process, but "
                f"it returned {everywhere}; reduce its count over processes"
            )
        progress.global_step = counted

    def _index(self, optimizer: Any) -> int:
        return next((i for i, one in enumerate(self._run.optimizers) if one is optimizer), 0)
