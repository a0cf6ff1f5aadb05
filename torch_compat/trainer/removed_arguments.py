"""Arguments of the Trainer of 1.x that Lightning 2.0 removed: refused with what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_INSTEAD = {
    "gpus": "Trainer(accelerator='gpu', devices=…)",
    "tpu_cores": "Trainer(accelerator='tpu', devices=…)",
    "ipus": "Trainer(accelerator='cpu', devices=…): IPUs are not driven",
    "num_processes": "Trainer(accelerator='cpu', devices=…)",
    "auto_select_gpus": "Trainer(accelerator='gpu', devices=…)",
    "distributed_backend": "Trainer(strategy=…)",
    "resume_from_checkpoint": "trainer.fit(model, ckpt_path=…)",
    "checkpoint_callback": "Trainer(enable_checkpointing=…, callbacks=[ModelCheckpoint(…)])",
    "early_stop_callback": "Trainer(callbacks=[EarlyStopping(…)])",
    "progress_bar_refresh_rate": "Trainer(callbacks=[TQDMProgressBar(refresh_rate=…)])",
    "process_position": "Trainer(callbacks=[TQDMProgressBar(process_position=…)])",
    "weights_summary": "Trainer(enable_model_summary=…) or Trainer(callbacks=[ModelSummary(max_depth=…)])",
    "weights_save_path": "Trainer(callbacks=[ModelCheckpoint(dirpath=…)])",
    "flush_logs_every_n_steps": "CSVLogger(flush_logs_every_n_steps=…)",
    "log_gpu_memory": "Trainer(callbacks=[DeviceStatsMonitor()])",
    "log_save_interval": "CSVLogger(flush_logs_every_n_steps=…)",
    "row_log_interval": "Trainer(log_every_n_steps=…)",
    "prepare_data_per_node": "the attribute prepare_data_per_node of module and data module",
    "reload_dataloaders_every_epoch": "Trainer(reload_dataloaders_every_n_epochs=1)",
    "replace_sampler_ddp": "Trainer(use_distributed_sampler=…)",
    "stochastic_weight_avg": "Trainer(callbacks=[StochasticWeightAveraging(swa_lrs=…)])",
    "terminate_on_nan": "Trainer(detect_anomaly=True)",
    "track_grad_norm": "self.log_dict(grad_norm(self, norm_type=2)) in on_before_optimizer_step",
    "auto_lr_find": "Tuner(trainer).lr_find(model)",
    "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(model)",
    "multiple_trainloader_mode": "CombinedLoader(loaders, mode=…)",
    "move_metrics_to_cpu": "nothing: logged values are read when somebody needs them",
    "amp_backend": "Trainer(precision='bf16-mixed')",
    "amp_level": "Trainer(precision='bf16-mixed')",
    "automatic_optimization": "the property automatic_optimization of the module",
    "enable_pl_optimizer": "nothing: self.optimizers() always gives wrapped optimizers",
    "truncated_bptt_steps": "manual optimization: split the batch in training_step, detach() the hidden state between the parts",
}


def naming_removed_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose error for an argument of 1.x names what replaces it.

    Raises:
        TypeError: as Python's own, for the first such argument.
    """

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name in _INSTEAD:
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}, which Lightning 2.0 removed; "
                    f"use {_INSTEAD[name]}"
                )
        init(self, *args, **kwargs)

    return construct
