"""Data parallelism over processes that the strategy starts. API: ``pytorch_lightning.strategies.DDPSpawnStrategy`` 1.6."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.precision import Precision
from torch_compat.run.era_signatures import modernise
from torch_compat.strategies.ddp import DDPStrategy, refuse_start_method, register_ddp
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.registry import StrategyRegistryType
from xlatrain.cluster import distributed
from xlatrain.cluster.spawn import SpawnedProcessError, spawn

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_LAYOUTS_OF_1_6 = {
    "optimizer_step": (("optimizer", "closure", "model"), ("optimizer", "opt_idx", "closure", "model")),
    "on_train_batch_start": (("batch", "batch_idx"), ("batch", "batch_idx", "dataloader_idx")),
}


class FakeQueue(list[Any]):
    """A queue that ``add_to_queue`` of :class:`DDPSpawnStrategy` fills in process 0 and ``get_from_queue`` empties here."""

    def put(self, item: Any) -> None:
        """Append an item."""
        self.append(item)

    def get(self) -> Any:
        """Take the oldest item."""
        return self.pop(0)

    def empty(self) -> bool:
        """Whether nothing is left."""
        return not self


class DDPSpawnStrategy(DDPStrategy):
    """Starts one process for each device; together they are one mesh, and train as one process with these devices would.

    ``fit``, ``validate``, ``test`` and ``predict`` run in the processes. Weights, metrics, counters, the callbacks' state and
    process 0's results come back. The script needs ``if __name__ == "__main__":``; module, data and callbacks are pickled. A
    strategy that drives all devices from this process (``"ddp"``) is faster and needs neither.

    Args:
        accelerator: the hardware; None: the Trainer's.
        parallel_devices: one process for each; None: as many as ``Trainer(devices=…)`` says.
        cluster_environment: refused: the processes are on this machine.
        checkpoint_io: how checkpoints reach storage.
        precision_plugin: dtypes.
        ddp_comm_state: refused, as the hooks are: XLA chooses and compiles the collectives.
        ddp_comm_hook: refused.
        ddp_comm_wrapper: refused.
        start_method: ``"spawn"``; others are refused.
        **kwargs: other arguments of :class:`DDPStrategy`.
    """

    strategy_name = "ddp_spawn"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        start_method: str = "spawn",
        **kwargs: Any,
    ) -> None:
        refuse_start_method(type(self).__name__, start_method, ("spawn",))
        plugins = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(*plugins, ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, start_method=start_method, **kwargs)
        self._spawned = False
        self._platform: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        modernise(cls, _is_ours, lambda self, args: self._of_its_era, _LAYOUTS_OF_1_6)

    def _of_its_era(self, name: str, values: dict[str, Any]) -> Any:
        """``opt_idx`` and ``model``, which 1.6 passes."""
        if name == "opt_idx":
            return next((i for i, one in enumerate(self.optimizers) if one is values.get("optimizer")), 0)
        return self.model

    # -- the processes ---------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> Any:
        """The strategy itself, until it has started the processes."""
        return None if self._spawned else self

    def configure(self, devices: Any, num_nodes: int, platform: str | None) -> None:
        """Take what the Trainer was told: one process for each device of this machine.

        Raises:
            MisconfigurationException: several hosts, a cluster environment, or a platform whose devices cannot be shared out.
        """
        if num_nodes > 1 or self.cluster_environment is not None:
            raise MisconfigurationException(
                "DDPSpawnStrategy starts processes on this machine only; for several hosts start one process on each (`xlatrain "
                "launch`, torchrun, srun) and use strategy='ddp'"
            )
        if platform == "tpu":
            raise MisconfigurationException("a host's TPU chips are driven by one process: use strategy='ddp'")
        self._platform = platform or "cpu"
        if self._parallel_devices is None:
            self._parallel_devices = [torch.device("cpu")] * _count(devices)

    @property
    def num_processes(self) -> int:
        """The number of processes that are started."""
        return len(self._parallel_devices or [None])

    @property
    def num_nodes(self) -> int:
        """Always 1: processes are started on this machine only."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise MisconfigurationException(f"DDPSpawnStrategy.num_nodes = {num_nodes}: it starts processes on this machine only")

    @property
    def world_size(self) -> int:
        return super().world_size if self._mesh_run.devices else self.num_processes

    @property
    def global_rank(self) -> int:
        return super().global_rank if self._mesh_run.devices else 0

    @property
    def local_rank(self) -> int:
        """The index of this process on its host."""
        return distributed.world().local_process_id

    def set_world_ranks(self, process_idx: int = 0) -> None:
        """Called in each process, before anything else, with its index."""

    def get_mp_spawn_kwargs(self, trainer: Trainer | None = None) -> dict[str, Any]:
        """The options with which the processes are started."""
        return {"nprocs": self.num_processes}

    def spawn(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` in fresh processes that have joined one world.

        Args:
            function: importable in a fresh process. One that takes an argument more gets the process's index first.
            *args: picklable.
            **kwargs: picklable.

        Returns:
            The output of the function of process 0.

        Raises:
            ProcessRaisedException: a process raised; with its traceback.
        """
        try:
            return spawn(
                _in_process,
                (self, function, args, kwargs),
                processes=self.get_mp_spawn_kwargs()["nprocs"],
                environment=self._environment,
            )
        except SpawnedProcessError as error:
            raise ProcessRaisedException(str(error), error.process_id, error.pid) from None

    def _environment(self, index: int) -> dict[str, str]:
        if self._platform == "gpu":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if "CUDA_VISIBLE_DEVICES" in os.environ else None
            return {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": str(index) if visible is None else visible[index]}
        return {"JAX_PLATFORMS": "cpu"}

    # -- results ---------------------------------------------------------------------------------------------------

    def add_to_queue(self, trainer: Trainer, queue: Any) -> None:
        """Put ``trainer.callback_metrics`` into the queue, as numpy arrays, then the module's own; in process 0 after the run."""
        queue.put({name: np.asarray(value) for name, value in trainer.callback_metrics.items()})
        own = getattr(trainer.lightning_module, "add_to_queue", None)
        if own is not None:
            own(queue)

    def get_from_queue(self, trainer: Trainer, queue: Any) -> None:
        """Take from the queue what :meth:`add_to_queue` put in, as tensors; in the parent."""
        metrics = {name: torch.from_numpy(np.array(value)) for name, value in queue.get().items()}
        trainer.metric_log.callback.update(metrics)
        own = getattr(trainer.lightning_module, "get_from_queue", None)
        if own is not None:
            own(queue)

    # -- around the run --------------------------------------------------------------------------------------------

    def run_stage(self, trainer: Trainer, stage: Callable[[], Any]) -> Any:
        self.dispatch(trainer)
        result = stage()
        self.post_dispatch(trainer)
        return result

    def dispatch(self, trainer: Trainer) -> None:
        """Called as the run begins, in each process."""

    def post_dispatch(self, trainer: Trainer) -> None:
        """Called after the run, in each process."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Waits for all processes; the only argument is a name."""
        super().barrier(*args, **kwargs)

    def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: Any, opt_idx: Any, closure: Any = None, model: Any = None, **kwargs: Any
    ) -> Any:
        """Step ``optimizer``; also in the form of 2.x, ``(optimizer, closure, model)``."""
        if callable(opt_idx):
            closure, model = opt_idx, closure
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def training_step_end(self, output: Any) -> Any:
        """Called at the end of the step, inside what is differentiated."""
        return output

    def validation_step_end(self, output: Any) -> Any:
        """Called at the end of the step, inside the program."""
        return output

    def test_step_end(self, output: Any) -> Any:
        """Called at the end of the step, inside the program."""
        return output

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before anything happens for the batch."""

    def reconciliate_processes(self, trace: str) -> None:
        """Do nothing: when one process fails, its parent ends the others and raises its traceback."""

    def pre_configure_ddp(self) -> None:
        """Do nothing: there is no wrapper around the module."""

    def configure_ddp(self) -> None:
        """Do nothing: there is no wrapper around the module."""

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Always None: a process has one device."""
        return None

    @property
    def torch_distributed_backend(self) -> str:
        """torch's process groups are not used."""
        return "xla"

    @staticmethod
    def configure_sync_batchnorm(model: Any) -> Any:
        """The model as it is: every BatchNorm sees the global batch."""
        return model

    @classmethod
    def register_strategies(cls, strategy_registry: StrategyRegistryType) -> None:
        register_ddp(strategy_registry, cls, {"ddp_spawn": "spawn"})


def _in_process(strategy: DDPSpawnStrategy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function in a spawned process, with its index where the function takes it."""
    strategy._spawned = True
    strategy.set_world_ranks(jax.process_index())
    return function(*_with_index(function, args, kwargs), **kwargs)


def _with_index(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments, with the process's index in front where the function takes one more than it was given."""
    signature = inspect.signature(function)
    for given in (args, (jax.process_index(), *args)):
        try:
            signature.bind(*given, **kwargs)
        except TypeError:
            continue
        return given
    return args


def _count(devices: Any) -> int:
    if devices in ("auto", -1, "-1"):
        return 1
    if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        return devices
    if isinstance(devices, str) and devices.strip().isdigit():
        return int(devices)
    if isinstance(devices, (list, tuple)) and devices:
        return len(devices)
    raise MisconfigurationException(f"devices={devices!r}: DDPSpawnStrategy starts one process for each; give a positive number")


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("torch_compat.") or kind is object
