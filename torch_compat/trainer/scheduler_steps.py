"""Steps of schedulers by the loop, in automatic optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.run import hook_calls as call
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.types import LRSchedulerConfig

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


def step_schedulers(trainer: Trainer, interval: str, *, batch_idx: int, plateau: bool) -> None:
    """Step the schedulers of ``interval`` that are due; those on a plateau only if ``plateau``, the others only if not.

    Raises:
        MisconfigurationException: the monitor of a strict scheduler has no value.
    """
    configs = trainer.lr_scheduler_configs
    if not configs or not trainer.lightning_module.automatic_optimization:
        return  # manual optimization steps its schedulers itself
    for config in configs:
        if config.reduce_on_plateau != plateau or config.interval != interval:
            continue
        done = (batch_idx if interval == "step" else trainer.current_epoch) + 1
        if done % config.frequency:
            continue
        monitored = _monitored(trainer, config) if plateau else None
        if plateau and monitored is None:
            continue
        call.module_hook(trainer, "lr_scheduler_step", config.scheduler, monitored)
        trainer.fit_loop.scheduler_steps += 1


def _monitored(trainer: Trainer, config: LRSchedulerConfig) -> Any:
    metrics = trainer.callback_metrics
    value = metrics.get(config.monitor or "")
    if value is None:
        text = f"ReduceLROnPlateau conditioned on metric {config.monitor} which is not available"
        if config.strict:
            raise MisconfigurationException(
                f"{text}. Available metrics are: {sorted(metrics)}. Log it with self.log, or set 'monitor' or 'frequency' in "
                "configure_optimizers"
            )
        rank_zero_warn(f"{text} but strict is set to `False`. Skipping learning rate update.", category=RuntimeWarning)
    return value
