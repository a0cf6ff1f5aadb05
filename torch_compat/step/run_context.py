"""Everything that steps see of the run that they belong to: protocols, which a Trainer, its strategy and its loops fulfil."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from jax.sharding import Mesh

from torch_compat.core.optimizer import LightningOptimizer
from torch_compat.plugins.loss_scaling import LossScaling
from torch_compat.run.batches import LoggedSize
from torch_compat.run.hook_context import HookContext, HookedStrategy
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.host.host_values import Counters, HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_run import MeshRun
from torch_compat.step.model_state import ModelState
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.placed_optimizers import PlacedOptimizers
from torch_compat.utilities.types import LRSchedulerConfig
from xlatrain.cluster.watch.account import Account
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.step.loss_scale import LossScaler


class StepStrategy(HookedStrategy, Protocol):
    """A strategy as its steps see it: the mesh, what lies there, and the members that are hooks inside of a step."""

    _mesh_run: MeshRun
    rules: ShardingRules
    remat: tuple[str, ...]
    no_recompilation_after: int | None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    @property
    def placed(self) -> ModelState | None: ...

    @placed.setter
    def placed(self, placed: ModelState | None) -> None: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]: ...

    def broadcast(self, obj: Any, src: int = 0) -> Any: ...

    def sharding_rules(self, module: torch.nn.Module) -> ShardingRules: ...

    def capture_context(self, module: torch.nn.Module) -> AbstractContextManager[None]: ...

    def captured_owners(self) -> dict[str, Any]: ...

    def backward(self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor: ...

    def pre_backward(self, closure_loss: torch.Tensor) -> None: ...

    def post_backward(self, closure_loss: torch.Tensor) -> None: ...

    def pre_optimizer_step(self, optimizer: torch.optim.Optimizer, optimizer_idx: int = 0) -> None: ...

    def post_optimizer_step(self, optimizer: torch.optim.Optimizer, optimizer_idx: int = 0) -> None: ...

    def post_training_step(self) -> None: ...

    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int: ...


class Counts(Protocol):
    """How far training is."""

    epoch: int
    total_batch: int
    global_step: int


class TakesValues(Protocol):
    """Results of a loop, to which values are logged.

    Attributes:
        batch_size: of the current batch.
    """

    batch_size: LoggedSize | None


class TrainingLoop(Protocol):
    """The loop whose batches the steps train on."""

    @property
    def progress(self) -> Counts: ...

    @property
    def results(self) -> TakesValues: ...

    def take_logs(self, outcome: StepOutcome) -> None: ...


class LogsOfRun(Protocol):
    """Where ``self.log`` leads to.

    Attributes:
        results: those of the loop that runs; None where no loop logs.
    """

    @property
    def results(self) -> TakesValues | None: ...


class TimeOfRun(Protocol):
    """Where a run's time goes to."""

    @property
    def account(self) -> Account: ...


class ShowsCompiling(Protocol):
    """A progress bar."""

    def announce(self, text: str) -> None: ...

    def show_compiling(self, compiling: bool) -> None: ...


class StepExecutor(Protocol):
    """The dispatcher of the run's steps, as the parts below it see it; for each see
    :class:`~torch_compat.step.dispatcher.StepDispatcher`."""

    optimization: Any
    recorder: LogRecorder | None
    tracer: ScalarTracer | None

    @property
    def loss_scaling(self) -> LossScaling | None: ...

    @property
    def placed_optimizers(self) -> PlacedOptimizers | None: ...

    def counters(self, batch_idx: int) -> HostValues: ...

    def evaluate(self, name: str, batch: Any, indices: tuple[int, ...]) -> StepOutcome: ...

    def after_failure(self, error: Exception, eagerly: Callable[[], StepOutcome]) -> StepOutcome: ...

    def random_state(self) -> dict[str, Any]: ...

    def load_random_state(self, state: Mapping[str, Any]) -> None: ...


class RunContext(HookContext, Protocol):
    """A run as its steps see it: module, strategy, callbacks, hooks, results, and the settings of updates.

    What user code may assign between two steps (clipping, accumulation, optimizers, callbacks) is read anew for each of them.
    """

    _detect_anomaly: bool
    accumulate_grad_batches: int
    gradient_clip_algorithm: str | None
    gradient_clip_val: int | float | None
    lr_scheduler_configs: list[LRSchedulerConfig]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]: ...

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer] | None) -> None: ...

    @property
    def strategy(self) -> StepStrategy: ...

    @property
    def scaler(self) -> LossScaler | None: ...

    @property
    def executor(self) -> StepExecutor: ...

    @property
    def fit_loop(self) -> TrainingLoop: ...

    @property
    def metric_log(self) -> LogsOfRun: ...

    @property
    def loop_counters(self) -> Counters: ...

    @property
    def run_time(self) -> TimeOfRun: ...

    @property
    def progress_bar_callback(self) -> ShowsCompiling | None: ...

    @property
    def transfer(self) -> Callable[[Any, int], Any]: ...
