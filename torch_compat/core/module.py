"""LightningModule: a ``torch.nn.Module`` with the steps, optimizers and hooks of a training run.

API: ``lightning.pytorch.LightningModule`` 2.6. The module asks its Trainer for everything that concerns the run; nothing
here knows of JAX or of meshes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from torch_compat.core.class_method import class_method_only
from torch_compat.core.device_dtype import _DeviceDtypeModuleMixin
from torch_compat.core.export import export_onnx, export_torchscript
from torch_compat.core.fabric_as_trainer import FabricAsTrainer
from torch_compat.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch_compat.core.hparams import HyperparametersMixin
from torch_compat.core.module_logging import LoggingMembers
from torch_compat.core.module_optimization import OptimizationMembers
from torch_compat.core.saving import MapLocation, load_from_checkpoint
from torch_compat.utilities.device_transfer import apply_to_collection, convert_to_tensors
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.types import STEP_OUTPUT, OptimizerLRScheduler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from torch_compat.trainer.trainer import Trainer


class LightningModule(
    _DeviceDtypeModuleMixin,
    HyperparametersMixin,
    LoggingMembers,
    OptimizationMembers,
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
            if self._fabric is not None:
                return FabricAsTrainer(self._fabric)  # pyright: ignore[reportReturnType]
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
        """The Fabric that set this module up, if one did; a weak proxy where it was assigned."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any | None) -> None:
        for child in self.children():
            if isinstance(child, LightningModule):
                child.fabric = fabric
        if fabric is not None and not isinstance(fabric, weakref.ProxyTypes):
            fabric = weakref.proxy(fabric)
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
        """The index of this process's first device on its host, see :attr:`global_rank`; 0 without a Trainer."""
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
        """The first logger of the Trainer, or None; of Fabric, where one must be."""
        if self._fabric is not None:
            return self._fabric.logger
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Any]:
        """The loggers of the Trainer (or Fabric); empty without one."""
        if self._fabric is not None:
            return self._fabric.loggers
        return self._trainer.loggers if self._trainer is not None else []

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The stand-in for torch's DeviceMesh in ``configure_model``, with ``ModelParallelStrategy``; None with others."""
        return self._device_mesh

    # ---- steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's inference computation."""
        return super().forward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Computes the loss of one batch: ``training_step(self, batch, batch_idx)``.

        Returns:
            The loss tensor, or a dict with key ``"loss"``, or None to skip the batch.
        """
        rank_zero_warn(
            "`training_step` must be implemented to be used with the Lightning Trainer: it returns the loss of a batch"
        )
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
            dicts; or None to fit without an optimizer. An optimizer is a ``torch.optim.Optimizer`` or, one for all parameters,
            an ``optax.GradientTransformation`` with its schedules in it (``trainer.optimizers`` has an
            :class:`~torch_compat.step.optimizers.OptaxOptimizer` then; a module with several makes these itself).
        """
        rank_zero_warn(
            "`configure_optimizers` must be implemented to be used with the Lightning Trainer: it returns the optimizer"
        )
        return None

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

        Inside a step on a mesh the batch is global and the world size 1: the result is ``x[None]``. A strategy for a single
        device, as ``devices=1`` without another one, adds no dimension.

        Args:
            data: tensors, numbers, or collections of them; other leaves are returned as they are.
            group: the group to gather over; the world by default.
            sync_grads: whether gradients flow back.

        Returns:
            ``data`` with tensors of shape ``(processes, *shape)``; those of a single-device strategy as they are.
        """
        if self._fabric is not None:
            return self._fabric.all_gather(data, group=group, sync_grads=sync_grads)
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
        """Refused, with what to use instead: TensorRT needs torch's own CUDA."""
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
            UntrustedValueError: hyperparameters of a command line name functions, or classes that the caller did not mean.
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
        state.pop("_kept_steps", None)
        return state


def _overrides_data_hook(datamodule: Any, hook_name: str) -> bool:
    from torch_compat.core.datamodule import LightningDataModule

    implementation = inspect.getattr_static(type(datamodule), hook_name, None)
    return implementation is not None and implementation is not inspect.getattr_static(LightningDataModule, hook_name)
