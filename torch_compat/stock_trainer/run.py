"""A run of stock's Trainer on the mesh: its module and optimizers placed, its steps compiled, and what they log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import Precision

from torch_compat.run import hook_calls, report
from torch_compat.step.device_memory import advice
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.kept_graphs import graphs_of
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.optimizers.forms import functional_form
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.placed_run import PlacedRun, captured_by
from torch_compat.stock_trainer.capturing import counter_readers, entered, give_logs, stock_stands_aside
from xlatrain.bridge.errors import CaptureError
from xlatrain.step.device_memory import explained_shortage

if TYPE_CHECKING:
    from torch_compat.strategies.strategy import Strategy

hook_calls.add_defaults(LightningModule, Callback, LightningDataModule)


class MeshRun:
    """The module and the optimizers of a run, on the mesh.

    Args:
        trainer: stock's.
        module: its module, whose parameters become live views of the mesh.
        strategy: has the mesh and the rules.
        precision: stock's plugin, whose forward context is around a step.

    Attributes:
        recorder, tracer: while a step is captured.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, strategy: Strategy, precision: Precision) -> None:
        self.trainer, self.module, self._strategy, self._precision = trainer, module, strategy, precision
        self.recorder: LogRecorder | None = None
        self.tracer: ScalarTracer | None = None
        self._pass: Any = None
        self._counters: Any = counter_readers(trainer)
        own_backward = module.automatic_optimization and hook_calls.has_own("backward", module)
        self._placed = PlacedRun(
            strategy,
            module,
            MeshStepRunner,
            roots=self._roots(),
            logging=self._capturing,
            forward=precision.forward_context,
            compiling=lambda on: None,
            backward=self._own_backward if own_backward else None,
            graphs=graphs_of(module).begin_run(),
        )
        self.model, self.steps = self._placed.model, self._placed.steps
        self.steps.copy_batches = True  # hooks and loaders may write into a batch while its step still runs
        self._placed.follow()

    def _roots(self) -> dict[str, Any]:
        """The objects of the user's whose attributes a step may read and write."""
        trainer: Any = self.trainer
        roots: dict[str, Any] = {"self": self.module}
        roots.update({f"trainer.callbacks[{i}]": one for i, one in enumerate(trainer.callbacks) if not _is_stock(one)})
        if trainer.datamodule is not None:
            roots["trainer.datamodule"] = trainer.datamodule
        return roots

    @contextlib.contextmanager
    def _capturing(self, recorder: LogRecorder, tracer: ScalarTracer) -> Iterator[None]:
        with captured_by(self, recorder, tracer), stock_stands_aside(self.module, recorder, tracer):
            yield

    def _own_backward(self, loss: torch.Tensor, differentiate: Any) -> None:
        """The module's ``backward``, while a step is captured: what it differentiates is found in ``.grad``."""
        with entered(self.module, "backward"):
            self.module.backward(loss)

    # -- optimizers ------------------------------------------------------------------------------------------------

    def place_optimizers(self, optimizers: list[torch.optim.Optimizer], schedulers: list[Any], *, manual: bool) -> None:
        """Put the state of the optimizers on the mesh.

        Raises:
            UnsupportedOptimizerError: one cannot run in a program.
        """
        pure = [functional_form(one, self._placed.names) for one in optimizers]
        functional = OptimizerSet(pure) if manual else pure[0] if pure else None
        self._placed.place_optimizers(functional, optimizers, schedulers, steps_them=manual)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose state is on the mesh."""
        return [] if self._placed.optimizers is None else self._placed.optimizers.optimizers

    @property
    def functional(self) -> FunctionalOptimizer | OptimizerSet | None:
        """The pure form of the optimizers."""
        return None if self._placed.optimizers is None else self._placed.optimizers.functional

    def push_states(self) -> None:
        """Take over what user code did to the optimizers' state since the last step."""
        if self._placed.optimizers is not None:
            self._placed.optimizers.push()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()`` with the state on the mesh, as ordinary tensors."""
        optimizers = self._placed.optimizers
        return optimizer.state_dict() if optimizers is None else plain(optimizers.state_dict(optimizer))

    # -- steps -----------------------------------------------------------------------------------------------------

    def host_values(self, batch_idx: int) -> HostValues:
        """The numbers that a step's Python may ask for."""
        return HostValues(HostNumbers({"batch_idx": batch_idx}, self._placed.traced.readers, self._counters))

    def begin_step(self) -> None:
        """Look for what user code has changed since the last step.

        Raises:
            CaptureError: parameters or optimizers that were not there when the run began.
        """
        trainer = self.trainer
        this_pass = (trainer.state.stage, trainer.current_epoch)
        if this_pass != self._pass:
            self._pass = this_pass
            self.steps.rescan()
        if names := self.model.other_parameters():
            raise CaptureError(
                f"self.{names[0]} is another parameter than when the run began; make parameters in __init__ or configure_model"
            )
        self.model.check_tensors()
        if (optimizers := self._placed.optimizers) is not None:
            optimizers.begin_step(trainer.optimizers)

    def explained_shortage(self) -> contextlib.AbstractContextManager[None]:
        """Explain a shortage of device memory in the block."""
        return explained_shortage(lambda: self.model.raw_state, self._advice)

    def _advice(self) -> Iterator[str]:
        return advice(self._strategy, self._precision.precision, of_fabric=False)

    def evaluate(self, name: str, args: tuple[Any, ...]) -> StepOutcome:
        """Run a validation, test or predict step: ``name`` is the method's, ``args`` what stock gives it."""
        batch, *indices = args

        def user_step(traced: Any, tracer: ScalarTracer) -> Any:
            counted = [tracer.counter("batch_idx"), *indices[1:]] if indices else []
            return getattr(self.module, name)(traced, *counted)

        with torch.inference_mode(False), torch.no_grad(), self.explained_shortage():
            self.begin_step()
            placed = self.steps.place(batch)
            values = self.host_values(indices[0] if indices else 0)
            return self.steps.evaluate(name, placed, (tuple(indices[1:]), len(indices)), values, user_step)

    def give_logs(self, outcome: StepOutcome) -> torch.Tensor | None:
        """Log what a step logged, see :func:`~torch_compat.stock_trainer.capturing.give_logs`, in the context of a step."""
        with self._precision.forward_context():
            return give_logs(self.module, outcome)

    # -- the end ---------------------------------------------------------------------------------------------------

    def release(self, *, failed: bool = False) -> None:
        """Give the module and the optimizers ordinary tensors on the host again."""
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
            self._placed.stop_following()
        self._placed.release(failed=failed)

    def report(self, stage: str) -> None:
        """Add the run to the run report, where one was asked for."""
        executor = "eager" if self.steps.log.fallback else "compiled"
        report.add_run(self.steps.log.run(stage, executor, self._strategy.mesh, self._precision.precision))


def plain(tree: Any) -> Any:
    """``tree`` with ordinary host tensors in place of those whose values are on the mesh."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return type(tree)((key, plain(value)) for key, value in tree.items())  # pyright: ignore[reportCallIssue]
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(plain(one) for one in tree)
    return tree


def _is_stock(one: Any) -> bool:
    return type(one).__module__.split(".")[0] == "lightning"
