"""The strategy for stock Lightning's Trainer whose steps are compiled over a mesh.

API: ``lightning.pytorch.strategies.Strategy`` 2.6, as stock's loops call it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from torch_compat.run import report
from torch_compat.run.report import ExecutorLog
from torch_compat.step.eager.fallback import bring_home, executor_choice, must_fall_back, why_eager
from torch_compat.step.guards.taking import given_again
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.stock_trainer.accelerator import JaxAccelerator, jax_devices
from torch_compat.stock_trainer.automatic import AutomaticSteps
from torch_compat.stock_trainer.dataloaders import global_batches
from torch_compat.stock_trainer.manual import ManualSteps
from torch_compat.stock_trainer.precision import for_mesh
from torch_compat.stock_trainer.run import MeshRun, plain
from torch_compat.stock_trainer.stock import refuse
from torch_compat.strategies import MeshStrategy as Mesh
from xlatrain.bridge.errors import BridgeError


class MeshStrategy(Strategy):
    """Compiled steps over a mesh of JAX's devices, in stock Lightning's Trainer.

    ``Trainer(devices=…)`` counts JAX's devices (``"auto"``: all); leave ``accelerator`` out. A loader's ``batch_size`` is that of
    one device, as under DDP: a step gets ``batch_size`` × the devices that split a batch.

    Args:
        axes, rules, **options: the mesh, as :class:`torch_compat.strategies.MeshStrategy` takes it.
        checkpoint_io: how checkpoints reach storage; None: as stock writes them.

    Raises:
        MisconfigurationException: when the Trainer is made, or a run begins: something of stock's that is not offered.
    """

    strategy_name = "xlatrain_mesh"

    def __init__(
        self, axes: Mapping[str, int] | None = None, rules: Any = (), *, checkpoint_io: Any = None, **options: Any
    ) -> None:
        self._mesh = Mesh(axes, rules, **options)
        self._devices: list[torch.device] | None = None
        self._run: MeshRun | None = None
        self._training: AutomaticSteps | ManualSteps | None = None
        super().__init__(accelerator=JaxAccelerator(), checkpoint_io=checkpoint_io)

    # -- devices and plugins -----------------------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """A device of torch's for each of the mesh's; the Trainer sets them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._mesh.take_devices(jax_devices([device.index for device in devices]))

    @property
    def num_nodes(self) -> int:
        """The number of processes: 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise refuse(f"Trainer(num_nodes={num_nodes})", "stock's loops know nothing of a mesh that spans processes")

    @property
    def precision_plugin(self) -> Precision:
        """Stock's own."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else for_mesh(precision_plugin)

    @property
    def _layer_sync(self) -> None:
        """Batch norm sees the whole global batch."""

    @_layer_sync.setter
    def _layer_sync(self, layer_sync: Any) -> None:
        """The statistics of ``sync_batchnorm=True`` are those that a compiled step has anyway."""

    @property
    def root_device(self) -> torch.device:
        """The CPU: user code keeps tensors there, and they go to the mesh with a step."""
        return torch.device("cpu")

    @property
    def world_size(self) -> int:
        """Devices in the mesh."""
        return self._mesh.world_size

    @property
    def global_rank(self) -> int:
        """0: there is one process, which drives all devices."""
        return 0

    local_rank = node_rank = global_rank

    @property
    def is_global_zero(self) -> bool:
        """True: there is one process."""
        return True

    def process_dataloader(self, dataloader: object) -> object:
        """The loader with the global batch: its ``batch_size`` × the devices that split a batch."""
        return global_batches(dataloader, self._trainer(), self._mesh)

    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # -- collectives: one process ------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor``: there is one process, and in a step it is of the global batch."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``tensor``, see :meth:`reduce`."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """There is one process."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj``: there is one process."""
        return obj

    # -- set-up and end ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Put the module on the mesh, and make optimizers there for ``fit``."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        self.model = self.precision_plugin.convert_module(module)
        reason = why_eager(module, self._mesh.mesh, detects_anomalies=fits and trainer._detect_anomaly)
        if reason is None:
            self.model_to_device()
        else:
            log = ExecutorLog(fallback=reason)
            report.add_run(log.run(str(trainer.state.fn.value), "eager", self._mesh.mesh, self.precision_plugin.precision))
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits and self._run is not None:
            self._place_optimizers(self._run)

    def _place_optimizers(self, run: MeshRun) -> None:
        manual = not run.module.automatic_optimization
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        optimizers = [one for one in self.optimizers if isinstance(one, torch.optim.Optimizer)]
        try:
            run.place_optimizers(optimizers, schedulers, manual=manual)
        except UnsupportedOptimizerError as error:
            self._go_on_eagerly(str(error))
        else:
            self._training = ManualSteps(run, self._lightning_optimizers) if manual else AutomaticSteps(run)

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self._mesh.connect(self.lightning_module)  # pyright: ignore[reportArgumentType]
        trainer = self._trainer()
        self._run = MeshRun(trainer, self.lightning_module, self._mesh, self.precision_plugin)

    def teardown(self) -> None:
        """Give the module back to the host."""
        self._leave_mesh(failed=self._trainer().interrupted)
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """A run ends with an error, maybe inside of a step, whose arrays are gone."""
        self._leave_mesh(failed=True)

    def _leave_mesh(self, *, failed: bool = False) -> None:
        if (run := self._run) is not None:
            self._run = self._training = None
            run.release(failed=failed)
            run.report(str(self._trainer().state.fn.value))

    def _go_on_eagerly(self, reason: str) -> None:
        """Let stock run the steps from now on, on this process's CPU.

        Raises:
            MisconfigurationException: only compiled steps are wanted.
        """
        run = self._run
        assert run is not None
        must_fall_back(executor_choice(), reason, self._mesh.mesh)
        run.steps.log.fallback = reason
        bring_home(run.model, self._leave_mesh, reason)

    def _fall_back(self, error: Exception) -> None:
        """Let stock run a step, and those after it, that could not be compiled or of which nothing is left but an error.

        Raises:
            Exception: ``error`` itself where it is another, or only compiled steps are wanted.
        """
        assert self._run is not None
        if isinstance(error, BridgeError):
            reason, recoverable = str(error), error.recoverable
        else:  # what the step did before is done once more, eagerly
            reason = f"the step raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            recoverable = self._run.steps.took_back(error)
        if executor_choice() == "compiled" or not recoverable:
            raise error
        self._go_on_eagerly(reason)

    # -- steps -------------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch of training: see :class:`~torch_compat.stock_trainer.automatic.AutomaticSteps`, and of manual optimization
        :class:`~torch_compat.stock_trainer.manual.ManualSteps`."""
        if self._training is not None:
            try:
                return self._training.training_step(args)
            except Exception as error:
                self._fall_back(error)
        with given_again():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The gradients of a step, which its program has made."""
        if self._training is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if isinstance(self._training, ManualSteps):
            return self._training.backward(closure_loss, *args, **kwargs)
        plugin, module = self.precision_plugin, self.lightning_module
        assert module is not None

        def before(loss: torch.Tensor) -> None:
            self.pre_backward(loss)
            plugin.pre_backward(loss, module)

        def after(loss: torch.Tensor) -> None:
            plugin.post_backward(loss, module)
            self.post_backward(loss)

        self._training.backward(closure_loss, before, after)
        return closure_loss.detach()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """``optimizer.step(closure)``."""
        if (training := self._training) is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(training, ManualSteps):
            return training.optimizer_step(optimizer, closure, **kwargs)
        if kwargs:
            raise TypeError(f"optimizer.step({', '.join(kwargs)}=…) is not supported by the compiled update: step(closure=…)")
        result = training.optimizer_step(optimizer, closure)
        if self._training is None:  # the closure's step could not be compiled: stock finishes it
            return super().optimizer_step(optimizer, lambda: result, model)
        training.finish(optimizer)
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """A validation step, as a program."""
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """A test step, as a program."""
        return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """A predict step, as a program."""
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._run is not None:
            try:
                run = self._run
                outcome = run.evaluate(name, args)
            except Exception as error:
                self._fall_back(error)
            else:
                run.give_logs(outcome)
                return outcome.result
        with given_again():
            return getattr(super(), name)(*args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's ``state_dict()``, as ordinary tensors."""
        return plain(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, as ordinary tensors."""
        own = getattr(optimizer, "_optimizer", optimizer)
        return super().optimizer_state(optimizer) if self._run is None else self._run.optimizer_state(own)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """The context of ``configure_model``: parameters get their values on their shards."""
        with self._mesh.model_sharded_context():
            yield
