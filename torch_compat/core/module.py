"""LightningModule: a ``torch.nn.Module`` with the steps, optimizers and hooks of a training run.

API: ``lightning.pytorch.LightningModule`` 2.6. The module asks its Trainer for everything that concerns the run; nothing
here knows of JAX or of meshes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from torch_compat.core.class_method import class_method_only
from torch_compat.core.device_dtype import _DeviceDtypeModuleMixin
from torch_compat.core.export import export_onnx, export_torchscript
from torch_compat.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch_compat.core.hparams import HyperparametersMixin
from torch_compat.core.logging import LogOptions, check_name, check_value, reduction
from torch_compat.core.saving import MapLocation, load_from_checkpoint
from torch_compat.core.toggling import restore_requires_grad, take_requires_grad
from torch_compat.utilities.device_transfer import apply_to_collection, convert_to_tensors
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.metric_types import is_collection, is_metric
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_warn
from torch_compat.utilities.types import STEP_OUTPUT, LRSchedulerPLType, LRSchedulerTypeUnion, OptimizerLRScheduler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchmetrics import MetricCollection

    from torch_compat.core.optimizer import LightningOptimizer
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import _METRIC

_warnings = WarningCache()

_UNATTACHED_LOG = (
    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet."
    " This is most likely because the model hasn't been passed to the `Trainer`"
)


class LightningModule(
    _DeviceDtypeModuleMixin,
    HyperparametersMixin,
    ModelHooks,
    DataHooks,
    CheckpointHooks,
    nn.Module,  # Last, so that the constructors of all the others run.
):
    """Organises model, steps and optimizers for the Trainer; see each method for what it may return."""

    # torch.jit.script must not compile properties that reach into the run.
    __jit_unused_properties__: ClassVar[list[str]] = [
        "example_input_array",
        "on_gpu",
        "current_epoch",
        "global_step",
        "global_rank",
        "local_rank",
        "logger",
        "loggers",
        "automatic_optimization",
        "trainer",
        "fabric",
        "strict_loading",
        "device_mesh",
        *_DeviceDtypeModuleMixin.__jit_unused_properties__,
        *HyperparametersMixin.__jit_unused_properties__,
    ]
    _jit_is_scripting = False

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._fabric: Any | None = None
        self._fabric_optimizers: list[Any] = []
        self._example_input_array: Tensor | tuple[Any, ...] | dict[str, Any] | None = None
        self._automatic_optimization: bool = True
        self._strict_loading: bool | None = None
        # The hook that is running, by which the Trainer knows what a `log` call may ask for.
        self._current_fx_name: str | None = None
        self._metric_attributes: dict[int, str] | None = None
        self._param_requires_grad_state: dict[Tensor, bool] = {}
        self._device_mesh: DeviceMesh | None = None

    # ---- the run that the module is part of

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module; ``RuntimeError`` while there is none."""
        if self._jit_is_scripting:
            return None  # pyright: ignore[reportReturnType]
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__qualname__} is not attached to a `Trainer`."
                " It is while `trainer.fit/validate/test/predict(model)` runs; outside of a run set `model.trainer = trainer`."
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for child in self.children():
            if isinstance(child, LightningModule):
                child.trainer = trainer
        self._trainer = trainer

    @property
    def fabric(self) -> Any | None:
        """The Fabric that set this module up, if one did."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any | None) -> None:
        for child in self.children():
            if isinstance(child, LightningModule):
                child.fabric = fabric
        self._fabric = fabric

    @property
    def example_input_array(self) -> Tensor | tuple[Any, ...] | dict[str, Any] | None:
        """Input for ``forward`` that export, model summary and graph loggers use; a tuple is unpacked, a dict gives keywords."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Tensor | tuple[Any, ...] | dict[str, Any] | None) -> None:
        self._example_input_array = example

    @property
    def current_epoch(self) -> int:
        """The current epoch; 0 without a Trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps taken over all epochs; 0 without a Trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Index of this process's first device in the mesh; 0 without a Trainer."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """As :attr:`global_rank`, on this host; 0 without a Trainer."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def on_gpu(self) -> bool:
        """Whether :attr:`device` is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def automatic_optimization(self) -> bool:
        """Whether the Trainer calls backward and the optimizers (else ``training_step`` does)."""
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic_optimization: bool) -> None:
        self._automatic_optimization = automatic_optimization

    @property
    def strict_loading(self) -> bool:
        """Whether loading a checkpoint demands exactly this module's names; True unless set."""
        return self._strict_loading is None or self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict_loading: bool) -> None:
        self._strict_loading = strict_loading

    @property
    def logger(self) -> Any | None:
        """The first logger of the Trainer (or Fabric), or None."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """All loggers of the Trainer (or Fabric); empty without one."""
        if self._fabric is not None:
            return self._fabric.loggers
        return self._trainer.loggers if self._trainer is not None else []

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Stands for the torch DeviceMesh of ``ModelParallelStrategy``, in ``configure_model``; None with other strategies."""
        return self._device_mesh

    # ---- logging

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on process 0, above the progress bar; arguments as for Python's ``print``."""
        if not self.trainer.is_global_zero:
            return
        progress_bar = self.trainer.progress_bar_callback
        # A progress bar of the user's own need not know whether it is enabled.
        if progress_bar is not None and getattr(progress_bar, "is_enabled", True):
            progress_bar.print(*args, **kwargs)
        else:
            print(*args, **kwargs)

    def log(
        self,
        name: str,
        value: _METRIC,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs a value under a name.

        Args:
            name: the key; the same on all processes.
            value: a number, a tensor with one element, or a ``torchmetrics.Metric``.
            prog_bar: show it on the progress bar.
            logger: give it to the loggers; True by default (False with Fabric's own rules).
            on_step: log it at this step. None: the hook's default (True in the hooks of a training batch).
            on_epoch: log it reduced over the epoch. None: the hook's default (True except in the hooks of a training batch).
            reduce_fx: the reduction over the epoch: mean, sum, min or max, or torch's function of that name.
            enable_graph: keep the autograd graph of ``value``.
            sync_dist: reduce over processes. A value computed inside a step on a mesh is already global.
            sync_dist_group: the process group to reduce over.
            add_dataloader_idx: append ``/dataloader_idx_N`` when there are several evaluation loaders.
            batch_size: weight in an epoch mean; the batch's dim 0 by default.
            metric_attribute: name of the attribute that holds ``value``, where it cannot be found.
            rank_zero_only: only process 0 calls this (then ``sync_dist`` would hang).

        Raises:
            ValueError: the value cannot be logged.
            MisconfigurationException: the hook or the combination of arguments does not allow it.
        """
        if self._fabric is not None:
            self._log_dict_through_fabric({name: value}, logger=logger)
            return
        trainer = self._trainer
        if trainer is None:
            rank_zero_warn(_UNATTACHED_LOG)
            return
        if trainer.barebones:
            rank_zero_warn(
                "You are trying to `self.log()` but `Trainer(barebones=True)` is configured. Logging can impact raw speed so"
                " it is disabled under this setting."
            )
            return
        check_name(name, add_dataloader_idx)
        check_value(name, value)
        options = LogOptions(
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduction(reduce_fx),
            enable_graph=enable_graph,
            sync_dist=sync_dist,
            sync_dist_group=sync_dist_group,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            metric_attribute=metric_attribute or self._metric_attribute(value),
            rank_zero_only=rank_zero_only,
        )
        trainer.metric_log.log(self, name, value, options)

    def log_dict(
        self,
        dictionary: Mapping[str, _METRIC] | MetricCollection,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs each value of ``dictionary`` (or of a ``MetricCollection``) as :meth:`log` does, with the same arguments."""
        if self._fabric is not None:
            self._log_dict_through_fabric(dictionary, logger=logger)
            return
        for name, value in _log_items(dictionary):
            self.log(
                name=name,
                value=value,
                prog_bar=prog_bar,
                logger=logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reduce_fx,
                enable_graph=enable_graph,
                sync_dist=sync_dist,
                sync_dist_group=sync_dist_group,
                add_dataloader_idx=add_dataloader_idx,
                batch_size=batch_size,
                rank_zero_only=rank_zero_only,
            )

    def _log_dict_through_fabric(self, dictionary: Mapping[str, _METRIC] | MetricCollection, logger: bool | None = None) -> None:
        if logger is False:
            return
        assert self._fabric is not None
        for name, value in _log_items(dictionary):
            check_value(name, value)
            number = value if isinstance(value, Tensor) else torch.tensor(value, device=self.device)
            self._fabric.log(name, number.squeeze())

    def _metric_attribute(self, value: Any) -> str | None:
        """The name under which this module holds a logged ``torchmetrics.Metric``."""
        if not is_metric(value):
            return None
        if self._metric_attributes is None or id(value) not in self._metric_attributes:
            self._metric_attributes = {id(m): name for name, m in self.named_modules() if is_metric(m)}
        if not self._metric_attributes:
            raise MisconfigurationException(
                "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
                " You can fix this by setting an attribute for the metric in your `LightningModule`."
            )
        name = self._metric_attributes.get(id(value))
        if name is None:
            raise MisconfigurationException(
                "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
                f" You can fix this by calling `self.log({value!r}, ..., metric_attribute=name)` where `name` is one of"
                f" {list(self._metric_attributes.values())}"
            )
        return name

    # ---- steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's inference computation."""
        return super().forward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Computes the loss of one batch: ``training_step(self, batch, batch_idx[, dataloader_iter])``.

        Returns:
            The loss tensor, or a dict with key ``"loss"``, or None to skip the batch.
        """
        rank_zero_warn("`training_step` must be implemented to be used with the Lightning Trainer")
        return None

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Evaluates one batch: ``validation_step(self, batch, batch_idx, dataloader_idx=0)``; a tensor, a dict or None."""
        return None

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Tests on one batch: ``test_step(self, batch, batch_idx, dataloader_idx=0)``; a tensor, a dict or None."""
        return None

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts one batch: ``predict_step(self, batch, batch_idx, dataloader_idx=0)``; ``self(batch)`` by default."""
        batch = kwargs.get("batch", args[0] if args else None)
        return self(batch)

    # ---- configuration

    def configure_callbacks(self) -> Sequence[Any] | Any:
        """Callbacks of this model: one or a list; they replace the Trainer's callbacks of the same type."""
        return []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Chooses optimizers and schedulers.

        Returns:
            One optimizer; a list or tuple of them; two lists (optimizers, and schedulers or ``LRSchedulerConfig`` dicts); a dict
            with ``"optimizer"`` and optionally ``"lr_scheduler"`` (a scheduler or such a dict) and ``"monitor"``; a tuple of such
            dicts; or None to fit without an optimizer.
        """
        rank_zero_warn("`configure_optimizers` must be implemented to be used with the Lightning Trainer")
        return None

    # ---- optimization

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizers of the run, for manual optimization: the one, or a list where there are several.

        Args:
            use_pl_optimizer: as :class:`LightningOptimizer` (whose ``step`` respects precision and counts steps); else the
                torch optimizers.
        """
        if self._fabric is not None:
            found = self._fabric_optimizers
        elif use_pl_optimizer:
            found = self.trainer.strategy._lightning_optimizers
        else:
            found = self.trainer.optimizers
        if isinstance(found, list) and len(found) == 1:
            return found[0]
        return found

    def lr_schedulers(self) -> list[LRSchedulerPLType] | LRSchedulerPLType | None:
        """The learning-rate schedulers of the run: None, the one, or a list."""
        configs = self.trainer.lr_scheduler_configs
        if not configs:
            return None
        if len(configs) == 1:
            return configs[0].scheduler
        return [config.scheduler for config in configs]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """``loss.backward()`` for manual optimization, with the run's precision and strategy; extra arguments go to backward."""
        if self._fabric is not None:
            self._fabric.backward(loss, *args, **kwargs)
            return
        self._verify_is_manual_optimization("manual_backward")
        self.trainer.strategy.backward(loss, None, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward of the loss; override it to do more.

        Args:
            loss: divided by ``accumulate_grad_batches``, and scaled where the precision scales losses.
            *args: passed on from :meth:`manual_backward`.
            **kwargs: passed on from :meth:`manual_backward`.
        """
        if self._fabric is not None:
            self._fabric.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Lets only ``optimizer``'s parameters require gradients, until :meth:`untoggle_optimizer`."""
        self._param_requires_grad_state = take_requires_grad(_as_list(self.optimizers()), optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Gives parameters of the other optimizers the ``requires_grad`` back that they had before :meth:`toggle_optimizer`."""
        restore_requires_grad(_as_list(self.optimizers()), optimizer, self._param_requires_grad_state)
        self._param_requires_grad_state = {}

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> Generator[None, None, None]:
        """:meth:`toggle_optimizer` and :meth:`untoggle_optimizer` around a block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients of ``optimizer``'s parameters now.

        Args:
            optimizer: whose parameters.
            gradient_clip_val: the bound; the Trainer's by default, 0 clips nothing.
            gradient_clip_algorithm: ``"norm"`` or ``"value"``; the Trainer's by default, else ``"norm"``.

        Raises:
            MisconfigurationException: another value than the Trainer's, or an unknown algorithm.
            TypeError: a bound that is no number.
        """
        if self._fabric is not None:
            self._fabric.clip_gradients(self, optimizer, **_fabric_clipping(gradient_clip_val, gradient_clip_algorithm))
            return
        value = self._clip_argument("gradient_clip_val", gradient_clip_val, 0.0)
        algorithm = self._clip_argument("gradient_clip_algorithm", gradient_clip_algorithm, "norm")
        if not isinstance(value, (int, float)):
            raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {value}.")
        self.trainer.strategy.clip_gradients(optimizer, value, _clip_algorithm(algorithm))

    def _clip_argument(self, name: str, given: Any, default: Any) -> Any:
        configured = getattr(self.trainer, name)
        if given is None:
            return default if configured is None else configured
        if configured is not None and configured != given:
            raise MisconfigurationException(
                f"You have set `Trainer({name}={configured!r})` and have passed"
                f" `clip_gradients({name}={given!r})`. Please use only one of them."
            )
        return given

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips gradients before the optimizer's step; override it to clip in another way.

        Args:
            optimizer: the optimizer that steps next.
            gradient_clip_val: the Trainer's bound.
            gradient_clip_algorithm: the Trainer's algorithm.
        """
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: Any | None) -> None:
        """Steps a scheduler; override it for schedulers that need more.

        Args:
            scheduler: the scheduler.
            metric: the monitored value of a ``ReduceLROnPlateau``, else None.
        """
        if metric is None:
            scheduler.step()  # pyright: ignore[reportCallIssue]
        else:
            scheduler.step(metric)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Makes one optimizer step; override it to step differently.

        Args:
            epoch: the current epoch.
            batch_idx: index of the batch.
            optimizer: the optimizer.
            optimizer_closure: runs ``training_step``, zero_grad and backward; it must run before the update.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clears gradients before backward; ``optimizer.zero_grad()`` by default."""
        optimizer.zero_grad()

    def _verify_is_manual_optimization(self, fn_name: str) -> None:
        if self.automatic_optimization:
            raise MisconfigurationException(
                f"to use {fn_name}, please disable automatic optimization: set model property `automatic_optimization` as False"
            )

    # ---- data and devices

    def _call_batch_hook(self, hook_name: str, *args: Any) -> Any:
        """Calls a batch hook on the data module if it overrides it, else here."""
        trainer = self._trainer
        if trainer is None:
            return getattr(self, hook_name)(*args)
        datamodule = getattr(trainer, "datamodule", None)
        owner = datamodule if datamodule is not None and _overrides_data_hook(datamodule, hook_name) else self
        return getattr(owner, hook_name)(*args)

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return self._call_batch_hook("on_before_batch_transfer", batch, dataloader_idx)

    def _apply_batch_transfer_handler(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = self._call_batch_hook("transfer_batch_to_device", batch, device or self.device, dataloader_idx)
        return self._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)

    def all_gather(
        self, data: Tensor | dict[str, Any] | list[Any] | tuple[Any, ...], group: Any | None = None, sync_grads: bool = False
    ) -> Tensor | dict[str, Any] | list[Any] | tuple[Any, ...]:
        """Gathers tensors (and numbers) of any nesting from all processes; every process must call it.

        Inside a step on a mesh the batch is global and the world is one: the result is ``x[None]``.

        Args:
            data: tensors, numbers, or collections of them; other leaves are returned as they are.
            group: the group to gather over; the world by default.
            sync_grads: whether gradients flow back.

        Returns:
            ``data`` with tensors of shape ``(processes, *shape)``; on one process stock's: the shape unchanged.
        """
        data = convert_to_tensors(data, device=self.device)
        gather = self.trainer.strategy.all_gather
        return apply_to_collection(data, Tensor, gather, group=group, sync_grads=sync_grads)

    def freeze(self) -> Self:
        """Switches gradients off for all parameters, and to eval mode."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Switches gradients on for all parameters, and to train mode."""
        self.requires_grad_(True)
        return self.train()

    # ---- export

    @torch.no_grad()
    def to_onnx(
        self, file_path: str | Path | BytesIO | None = None, input_sample: Any | None = None, **kwargs: Any
    ) -> Any | None:
        """Exports to ONNX by ``torch.onnx.export``.

        Args:
            file_path: where to write; None (only with ``dynamo=True``) returns the program without writing.
            input_sample: input for ``forward``; :attr:`example_input_array` by default.
            **kwargs: passed on to ``torch.onnx.export``.

        Raises:
            ModuleNotFoundError: ``onnx`` (or ``onnxscript`` with ``dynamo=True``) is not installed.
            ValueError: there is no input sample.
        """
        return export_onnx(self, file_path, input_sample, **kwargs)

    @torch.no_grad()
    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: str | None = "script",
        example_inputs: Any | None = None,
        **kwargs: Any,
    ) -> torch.ScriptModule | dict[str, torch.ScriptModule]:
        """Compiles to TorchScript, in eval mode (deprecated, as TorchScript is: use ``torch.export.export``).

        Args:
            file_path: where to save it, if anywhere.
            method: ``"script"`` or ``"trace"``.
            example_inputs: inputs to trace with; :attr:`example_input_array` by default.
            **kwargs: passed on to ``torch.jit.script`` or ``torch.jit.trace``.

        Raises:
            ValueError: another method, or nothing to trace with.
        """
        return export_torchscript(self, file_path, method, example_inputs, **kwargs)

    def to_tensorrt(
        self,
        file_path: str | Path | BytesIO | None = None,
        input_sample: Any | None = None,
        ir: Literal["default", "dynamo", "ts"] = "default",
        output_format: Literal["exported_program", "torchscript"] = "exported_program",
        retrace: bool = False,
        default_device: str | torch.device = "cuda",
        **compile_kwargs: Any,
    ) -> Any:
        """Not offered: TensorRT needs torch's own CUDA; refused with what to use instead."""
        raise NotImplementedError(
            "`LightningModule.to_tensorrt` is not offered: Torch-TensorRT compiles with torch's own CUDA, which a JAX run"
            " does not have. Export with `to_onnx()` and build the engine from that file, or call"
            " `torch_tensorrt.compile(model)`."
        )

    @class_method_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes a module from a checkpoint: its ``__init__`` with the saved hyperparameters, then its ``state_dict``.

        Args:
            checkpoint_path: one of our checkpoint directories, a stock ``.ckpt`` file, a file object or a URL.
            map_location: as for ``torch.load``.
            hparams_file: ``.yaml`` or ``.csv`` with hyperparameters for a checkpoint that has none.
            strict: whether the names must match exactly; :attr:`strict_loading` by default.
            weights_only: False unpickles arbitrary objects, which runs code from the file: only for a file that you trust.
                By default what ``torch.load`` has as its default: True.
            **kwargs: hyperparameters that override the saved ones, or were not saved.

        Returns:
            The module, on the device of the loaded tensors, in train mode.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            RuntimeError: the names or shapes do not match (``strict``).
        """
        return load_from_checkpoint(  # pyright: ignore[reportReturnType]
            cls,
            checkpoint_path,
            map_location=map_location,
            hparams_file=hparams_file,
            strict=strict,
            weights_only=weights_only,
            **kwargs,
        )

    def __getstate__(self) -> dict[str, Any]:
        # A module that is copied or sent to another process leaves its run behind.
        state = dict(self.__dict__)
        state["_trainer"] = None
        return state


def _log_items(dictionary: Mapping[str, Any] | MetricCollection) -> list[tuple[str, Any]]:
    if is_collection(dictionary):
        # The compute groups' members must stay separate states, because each is reset and computed on its own.
        return list(dictionary.items(keep_base=False, copy_state=False))
    if not isinstance(dictionary, Mapping):
        raise TypeError(
            f"`self.log_dict` expects a mapping of names to values, found {type(dictionary).__name__}: {dictionary!r}."
        )
    return list(dictionary.items())


def _as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def _clip_algorithm(algorithm: Any) -> Any:
    from torch_compat.utilities.enums import GradClipAlgorithmType

    if not GradClipAlgorithmType.supported_type(str(algorithm).lower()):
        raise MisconfigurationException(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed algorithms: {GradClipAlgorithmType.supported_types()}."
        )
    return GradClipAlgorithmType(str(algorithm).lower())


def _fabric_clipping(value: int | float | None, algorithm: str | None) -> dict[str, Any]:
    return {"clip_val": value} if str(algorithm or "norm").lower() == "value" else {"max_norm": value}


def _overrides_data_hook(datamodule: Any, hook_name: str) -> bool:
    from torch_compat.core.datamodule import LightningDataModule

    implementation = inspect.getattr_static(type(datamodule), hook_name, None)
    return implementation is not None and implementation is not inspect.getattr_static(LightningDataModule, hook_name)
