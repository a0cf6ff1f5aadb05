"""The eager executor on torch's own devices: user code runs op by op on them, and each step is one dispatch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jax.sharding import Mesh, PartitionSpec

from torch_compat.device_backends import DeviceBackend, PlacedModule
from torch_compat.device_backends.step_log import StepLog
from torch_compat.plugins.eight_bits import EightBitPrecision, TransformerEnginePrecision
from torch_compat.run import hook_calls as call
from torch_compat.run.batches import LoggedSize, first_batch_size, flatten_batch, map_tensors
from torch_compat.run.report import ExecutorLog
from torch_compat.run.states import TrainerFn
from torch_compat.step import mesh_state
from torch_compat.step.dispatcher import StepDispatcher
from torch_compat.step.eager.eager import EagerOptimization, EagerSteps, HostBatch
from torch_compat.step.eager.fallback import executor_choice
from torch_compat.step.effects.logged import LogEntry
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import replicated_eager
from xlatrain.mesh.batch_layout import BatchLayout, BatchPadding
from xlatrain.mesh.mesh import batch_axes

if TYPE_CHECKING:
    from torch_compat.plugins.precision import Precision
    from torch_compat.step.host.host_values import HostValues
    from torch_compat.strategies.on_device import DeviceStrategy


@dataclass
class DeviceLog(ExecutorLog):
    """The log of an executor, with the package that drove the devices, and which devices.

    Attributes:
        backend: its package.
        platform: the hardware; the mesh of the report is the host's picture of it.
    """

    backend: str = ""
    platform: str = ""

    def how(self, executor: str) -> str:
        """Which package drives which devices."""
        return f"{executor} through {self.backend} ({self.platform})"

    def run(self, stage: str, executor: str, mesh: Mesh, precision: str) -> dict[str, Any]:
        """The run's entry in the report."""
        entry = super().run(stage, executor, mesh, precision)
        return {**entry, "backend": self.backend, "platform": self.platform}


class DeviceSteps(EagerSteps):
    """Runs steps on the devices; logged values stay there until somebody reads them.

    Args:
        executor: directs ``self.log`` here.
        backend: runs them.
        mesh: how rows are split.
        precision: surrounds the forward pass.
    """

    def __init__(self, executor: DeviceStepDispatcher, backend: DeviceBackend, mesh: Mesh, precision: Precision) -> None:
        super().__init__(precision, "")
        self.log = DeviceLog(backend=backend.name, platform=backend.platform)
        self._executor = executor
        self._backend = backend
        self._axes = batch_axes(mesh)
        self._layout = BatchLayout.from_mesh(mesh)
        self._known: dict[tuple[LogEntry, ...], list[LogEntry]] = {}
        self._compiled = backend.compiled()

    def place(self, batch: Any) -> HostBatch:
        """The batch on the devices: leaves whose dim 0 is the batch size are split over the data axes, others are whole."""
        leaves, spec = flatten_batch(batch)
        size = first_batch_size(leaves)
        total, moved = 1, []
        for leaf in leaves:
            if leaf.ndim and leaf.shape[0] == size and self._axes:
                moved.append(self._backend.put_rows(leaf, self._axes))
                total = moved[-1].shape[0]
            else:
                moved.append(self._backend.put(leaf, PartitionSpec()))
        logged = LoggedSize.of([leaf.shape for leaf in moved], spec)
        return HostBatch(spec.unflatten(moved), total if self._axes else size or 1, logged)

    @contextlib.contextmanager
    def dispatch(self) -> Iterator[StepLog]:
        """The context of a step; what it logs is in the :class:`StepLog`."""
        log = StepLog()
        with self._backend.step(), self._executor.inside_step(log):
            yield log

    def outcome(self, log: StepLog, packed: Any, result: Any, logged: LoggedSize) -> StepOutcome:
        """The outcome of a step. Steps that log the same share their entries, which results are bound to once."""
        self.log.variants = self._backend.compiled() - self._compiled
        key = tuple(log.entries)
        entries = self._known.setdefault(key, log.entries)
        return StepOutcome(entries, packed, lambda: result, logged)

    def evaluate(
        self, name: str, batch: HostBatch, static: Hashable, host_values: HostValues, call: Callable[[Any, Any], Any]
    ) -> StepOutcome:
        """Run one validation, test or predict step; the result is that of this process's rows."""
        with self.dispatch() as log:
            with torch.no_grad(), self._precision.forward_context():
                result = call(batch.batch, None)
            packed = log.packed(self._backend.root_device)
        return self.outcome(log, packed, self._own_rows(result, batch.size), batch.logged)

    def _own_rows(self, result: Any, size: int) -> Any:
        """Cut this process's rows out of values with one row per sample, on several processes."""
        if self._layout.processes == 1:
            return result
        own = torch.from_numpy(self._layout.own_rows(BatchPadding.full(size)))

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().cpu()[own] if tensor.ndim and tensor.shape[0] == size else tensor

        return map_tensors(cut, result)


class DeviceOptimization(EagerOptimization):
    """Automatic and manual optimization on the devices.

    Args:
        run: the run.
        steps: the executor.
        optimizers: what ``configure_optimizers`` returned.
        placed: the module.
        backend: runs them.
    """

    _steps: DeviceSteps

    def __init__(
        self,
        run: RunContext,
        steps: DeviceSteps,
        optimizers: list[torch.optim.Optimizer],
        placed: PlacedModule,
        backend: DeviceBackend,
    ) -> None:
        super().__init__(run, steps, optimizers)
        self._optimizers = optimizers
        self._placed = placed
        self._backend = backend
        self._annotated = False

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        placed = self._steps.place(batch)
        self._run.fit_loop.results.batch_size = placed.logged
        self._steps.log.steps += 1
        with _explaining_autograd(self._backend), self._steps.dispatch() as log:
            if self._user.steps_once:
                outputs = self._user.automatic(placed.batch, batch_idx, stepped)
            else:
                outputs = self._user.manual(placed.batch, batch_idx)
            if not self._annotated and any(optimizer.state for optimizer in self._optimizers):
                for optimizer in self._optimizers:
                    self._placed.annotate(optimizer)
                self._annotated = True
            packed = log.packed(self._backend.root_device)
        return self._steps.outcome(log, packed, outputs, placed.logged)


@contextlib.contextmanager
def _explaining_autograd(backend: DeviceBackend) -> Iterator[None]:
    """Torch's autograd starts its threads for the devices that are there at the first backward pass of a process."""
    try:
        yield
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise RuntimeError(
            f"a backward pass ran in this process before {backend.name} was started, so that torch's autograd has no thread for "
            f"{backend.root_device}; make the Trainer before it"
        ) from error


class DeviceStepDispatcher(StepDispatcher):
    """Runs the steps of one run on the devices of the strategy's backend."""

    _placed: PlacedModule | None = None

    @property
    def _strategy(self) -> DeviceStrategy:
        return self._run.strategy  # pyright: ignore[reportReturnType]

    def start(self) -> None:
        """Place the model; once in a run.

        Raises:
            MisconfigurationException: only compiled steps are wanted, or the precision needs loss scaling, or eight bits.
        """
        if self.steps is not None:
            return
        run, strategy = self._run, self._strategy
        if executor_choice() == "compiled":
            raise MisconfigurationException(
                f"XLATRAIN_EXECUTOR=compiled, but {type(strategy).__name__} runs steps op by op through "
                f"{strategy.backend.name}; leave the strategy out for compiled steps"
            )
        if run.scaler is not None and run.state.fn == TrainerFn.FITTING:
            raise MisconfigurationException(
                f"precision={run.precision_plugin.precision!r} scales the loss, which {type(strategy).__name__} does not; use "
                "precision='bf16-mixed', which needs no scaling"
            )
        if isinstance(run.precision_plugin, EightBitPrecision | TransformerEnginePrecision):
            raise MisconfigurationException(
                f"precision={run.precision_plugin.precision!r}: products in eight bits are compiled by JAX, and "
                f"{type(strategy).__name__} runs steps through {strategy.backend.name}; use precision='bf16-mixed', or leave the "
                "strategy out"
            )
        call.old_hooks(run, "on_post_move_to_device")  # ties made here hold in checkpoints
        if run._detect_anomaly:
            self._contexts.enter_context(torch.autograd.set_detect_anomaly(True))
        module = run.precision_plugin.convert_module(run.lightning_module)
        strategy.backend.manual_seed(strategy.broadcast(torch.initial_seed()))
        self._placed = PlacedModule(module, strategy.backend, strategy.mesh, strategy.sharding_rules(module))
        strategy.on_device = self._placed
        strategy.module_placed(module)
        self.steps = DeviceSteps(self, strategy.backend, strategy.mesh, run.precision_plugin)

    @contextlib.contextmanager
    def inside_step(self, log: StepLog) -> Iterator[None]:
        """The context of a step's user code: ``self.log`` goes to ``log``, and collectives are identities on global tensors."""
        self.recorder = log  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with replicated_eager():
                yield
        finally:
            self.recorder = None

    def _optimize_eagerly(self) -> None:
        assert isinstance(self.steps, DeviceSteps) and self._placed is not None
        optimizers = self._run.optimizers
        for optimizer in optimizers:
            if optimizer.state:  # of an earlier run
                self._placed.load_optimizer(optimizer, optimizer.state_dict())
        self.optimization = DeviceOptimization(self._run, self.steps, optimizers, self._placed, self._strategy.backend)

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizers the state of a checkpoint, on the devices."""
        optimizers = self._run.optimizers
        mesh_state.check_optimizers(optimizers, states)
        assert self._placed is not None
        for optimizer, state in zip(optimizers, states, strict=True):
            self._placed.load_optimizer(optimizer, state)

    def random_state(self) -> dict[str, Any]:
        """The stream of the devices."""
        return {"device_rng": self._strategy.backend.random_state()}

    def load_random_state(self, state: Mapping[str, Any]) -> None:
        """Continue the stream of a checkpoint; one of compiled steps has none of these devices."""
        if "device_rng" in state:
            self._strategy.backend.set_random_state(state["device_rng"])

    def release(self, *, failed: bool = False) -> None:
        """Give the module and the optimizers ordinary host tensors again."""
        placed, self._placed = self._placed, None
        if placed is not None:
            self._strategy.module_released()
            self._strategy.on_device = None
            placed.release(self._run.optimizers, failed=failed)
