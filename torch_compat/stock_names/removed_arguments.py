"""Arguments of 1.x that Lightning 2.0 removed: refused with what to use instead; misspelt ones with what was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OF_TRAINER = {
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
    "overfit_pct": "Trainer(overfit_batches=…)",
    "train_percent_check": "Trainer(limit_train_batches=…)",
    "val_percent_check": "Trainer(limit_val_batches=…)",
    "test_percent_check": "Trainer(limit_test_batches=…)",
    "min_nb_epochs": "Trainer(min_epochs=…)",
    "max_nb_epochs": "Trainer(max_epochs=…)",
    "nb_gpu_nodes": "Trainer(num_nodes=…)",
    "num_tpu_cores": "Trainer(accelerator='tpu', devices=…)",
    "use_amp": "Trainer(precision='bf16-mixed')",
    "show_progress_bar": "Trainer(enable_progress_bar=…)",
}
OF_CHECKPOINT = {
    "filepath": "ModelCheckpoint(dirpath=…, filename=…)",
    "period": "ModelCheckpoint(every_n_epochs=…)",
    "every_n_val_epochs": "ModelCheckpoint(every_n_epochs=…)",
    "prefix": "ModelCheckpoint(filename=…)",
    "save_best_only": "ModelCheckpoint(save_top_k=1)",
}
OF_FIT = {"train_dataloader": "train_dataloaders=…", "val_dataloader": "val_dataloaders=…"}
_EVALUATED = ("test_dataloaders", "val_dataloaders", "test_dataloader", "val_dataloader")
OF_EVALUATION: dict[str, str] = dict.fromkeys(_EVALUATED, "dataloaders=…")


def naming_removed_arguments(instead: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make the errors of a function or constructor about arguments of 1.x name their replacements.

    Args:
        instead: removed argument → what to use.

    Raises:
        TypeError: as Python's own, for the first argument that is unknown, if there is something to say about it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not kwargs.keys() <= known.keys():
                unknown = next(name for name in kwargs if name not in known)
                if advice := _advice(unknown, instead, known):
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown!r}{advice}")
            return function(*args, **kwargs)

        return call

    return decorate


def _advice(unknown: str, instead: Mapping[str, str], known: Iterable[str]) -> str:
    if unknown in instead:
        return f", which Lightning 2.0 removed; use {instead[unknown]}"
    close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]!r}?" if close else ""
