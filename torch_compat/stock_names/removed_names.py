"""Names of Lightning 1.x that later releases removed, and what to use instead.

What can be accepted of 1.x is (``torch_compat.legacy``). The names below cannot: whoever asks for one gets the error that stock
raises for a missing name, of the same class, with the way on behind it.
"""

from __future__ import annotations

from typing import NoReturn

_METRICS = "torchmetrics: `from torchmetrics import Accuracy`"
_RESULT = "self.log(name, value) or self.log_dict({…}), and return the loss"
_FABRIC = "lightning.fabric.Fabric"

# Modules and their members, without the package's own name.
_IN_MODULES = {
    "metrics": _METRICS,
    "metrics.functional": "torchmetrics.functional",
    "lite": _FABRIC,
    "lite.LightningLite": _FABRIC,
    "logging": "lightning.pytorch.loggers",
    "core.step_result": _RESULT,
    "core.memory": "lightning.pytorch.utilities.model_summary",
    "core.decorators": "nothing: tensors and modules are placed by the Trainer",
    "trainer.training_io": "lightning.pytorch.utilities and Trainer.save_checkpoint",
    "EvalResult": _RESULT,
    "TrainResult": _RESULT,
    "callbacks.GPUStatsMonitor": "DeviceStatsMonitor",
    "callbacks.XLAStatsMonitor": "DeviceStatsMonitor",
    "callbacks.QuantizationAwareTraining": "torch.ao.quantization on the module after fit",
    "callbacks.ProgressBarBase": "ProgressBar",
    "loggers.LightningLoggerBase": "Logger",
    "loggers.LoggerCollection": "Trainer(logger=[…]) and trainer.loggers",
    "loggers.TestTubeLogger": "TensorBoardLogger",
    "loggers.base": "lightning.pytorch.loggers.logger",
    "loggers.base.LightningLoggerBase": "lightning.pytorch.loggers.Logger",
    "overrides.data_parallel": "nothing: strategy='ddp' drives all devices of a process",
    "profiler": "lightning.pytorch.profilers",
    "tuner.auto_gpu_select": "Trainer(accelerator='gpu', devices=…)",
    "utilities.AMPType": "the string trainer.precision",
    "utilities.DeviceType": "isinstance(trainer.accelerator, CUDAAccelerator), TPUAccelerator, …",
    "utilities.DistributedType": "isinstance(trainer.strategy, DDPStrategy), FSDPStrategy, …",
    "utilities._APEX_AVAILABLE": "the precision plugins; apex is not used",
    "utilities._TPU_AVAILABLE": "TPUAccelerator.is_available()",
    "utilities.argparse_utils": "LightningCLI, or an ArgumentParser of your own",
    "utilities.cli": "lightning.pytorch.cli",
    "utilities.metrics": "torchmetrics",
    "utilities.distributed.sync_ddp_if_available": "self.log(…, sync_dist=True)",
}

_OF_TRAINER = {
    "training_type_plugin": "it is `trainer.strategy` since Lightning 1.6",
    "accelerator_connector": "use trainer.strategy and trainer.accelerator",
    "add_argparse_args": "use lightning.pytorch.cli.LightningCLI, or an ArgumentParser of your own",
    "from_argparse_args": "use Trainer(**options), or lightning.pytorch.cli.LightningCLI",
    "default_attributes": "use inspect.signature(Trainer).parameters",
    "parse_argparser": "use LightningCLI",
    "match_env_arguments": "use LightningCLI",
    "data_parallel": "use trainer.strategy",
    "data_parallel_device_ids": "use trainer.device_ids",
    "devices": "use trainer.num_devices or trainer.device_ids",
    "disable_validation": "use trainer.enable_validation",
    "evaluate": "use trainer.validate or trainer.test",
    "gpus": "use trainer.num_devices and trainer.accelerator",
    "lightning_optimizers": "use trainer.optimizers",
    "logger_connector": "use trainer.callback_metrics, trainer.logged_metrics or trainer.progress_bar_metrics",
    "lr_find": "use lightning.pytorch.tuner.Tuner(trainer).lr_find(model)",
    "lr_schedulers": "use trainer.lr_scheduler_configs",
    "num_gpus": "use trainer.num_devices",
    "num_processes": "use trainer.world_size or trainer.num_nodes",
    "optimizer_frequencies": "use manual optimization: count batches in training_step",
    "progress_bar_dict": "use trainer.progress_bar_metrics",
    "root_gpu": "use trainer.strategy.root_device",
    "run_stage": "use super().start_training(trainer) in a TrainingTypePlugin",
    "run_evaluation": "use trainer.validate(model)",
    "scale_batch_size": "use lightning.pytorch.tuner.Tuner(trainer).scale_batch_size(model)",
    "should_rank_save_checkpoint": "use trainer.is_global_zero",
    "terminate_on_nan": "use Trainer(detect_anomaly=True)",
    "tpu_cores": "use trainer.num_devices",
    "tpu_local_core_rank": "use trainer.local_rank",
    "train_loop": "use trainer.fit_loop",
    "tune": "use lightning.pytorch.tuner.Tuner(trainer).lr_find(model) and scale_batch_size(model)",
    "tuner": "use lightning.pytorch.tuner.Tuner(trainer)",
    "use_amp": "use trainer.precision",
    "use_ddp": "use trainer.strategy",
    "use_dp": "use trainer.strategy",
    "use_tpu": "use trainer.accelerator",
    "verbose_evaluate": "use trainer.validate(model, verbose=…)",
    "weights_save_path": "use trainer.default_root_dir or ModelCheckpoint(dirpath=…)",
}

_OF_MODULE = {
    "datamodule": "use self.trainer.datamodule",
    "get_progress_bar_dict": "override get_metrics of a ProgressBar callback",
    "get_tqdm_dict": "override get_metrics of a ProgressBar callback",
    "grad_norm": "use lightning.pytorch.utilities.grad_norm(self, norm_type)",
    "load_from_metrics": "use load_from_checkpoint",
    "loaded_optimizer_states_dict": "use trainer.fit(model, ckpt_path=…)",
    "log_grad_norm": "use self.log_dict(grad_norm(self, norm_type=2)) in on_before_optimizer_step",
    "model_size": "use sum(p.numel() * p.element_size() for p in self.parameters())",
    "summarize": "use lightning.pytorch.utilities.model_summary.summarize(model)",
    "tng_dataloader": "implement train_dataloader",
    "training_tqdm_dict": "use self.trainer.progress_bar_metrics",
    "use_amp": "use self.trainer.precision",
    "use_ddp": "use self.trainer.strategy",
    "use_dp": "use self.trainer.strategy",
    "use_tpu": "use self.trainer.accelerator",
}


def of_trainer(name: str) -> str:
    """The advice to add to "the Trainer has no attribute ``name``": ``": use …"``, or nothing."""
    return f": {_OF_TRAINER[name]}" if name in _OF_TRAINER else ""


def of_module(name: str) -> str:
    """The advice to add to "the LightningModule has no attribute ``name``": ``": use …"``, or nothing."""
    return f": {_OF_MODULE[name]}" if name in _OF_MODULE else ""


def in_modules(name: str) -> str | None:
    """The message about a removed module or member, named below ``pytorch_lightning``; None if it never was there."""
    if name not in _IN_MODULES:
        return None
    return f"`pytorch_lightning.{name}` was removed by a later release of Lightning; use {_IN_MODULES[name]}"


class RemovedMember:
    """A member of a class that is the error of a missing one, on the class too, where no ``__getattr__`` is asked."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        text = f"type object {owner.__name__!r} has no attribute {self._name!r}{of_trainer(self._name)}"
        raise AttributeError(text, name=self._name, obj=owner)
