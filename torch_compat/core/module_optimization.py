"""The optimization of a LightningModule: what a step written by hand calls, and what automatic optimization lets it override.

API: ``lightning.pytorch.LightningModule`` 2.6.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from torch_compat.core.toggling import restore_requires_grad, take_requires_grad
from torch_compat.utilities.enums import GradClipAlgorithmType
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.types import LRSchedulerPLType, LRSchedulerTypeUnion

if TYPE_CHECKING:
    from torch_compat.core.optimizer import LightningOptimizer
    from torch_compat.trainer.trainer import Trainer


class OptimizationMembers(nn.Module):
    """The members of a LightningModule about optimizers, schedulers, backward passes and clipping."""

    trainer: Trainer
    automatic_optimization: bool
    _fabric: Any | None
    _fabric_optimizers: list[Any]
    _param_requires_grad_state: dict[Tensor, bool]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizers of the run, for manual optimization: the optimizer, or a list where there are several.

        ::

            class Halving(BoringModel):
                def on_train_epoch_end(self):
                    for group in self.optimizers().param_groups:
                        group["lr"] /= 2

            trainer.fit(Halving(), loader)

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
        """The learning-rate schedulers of the run: None, the scheduler, or a list where there are several."""
        configs = self.trainer.lr_scheduler_configs
        if not configs:
            return None
        if len(configs) == 1:
            return configs[0].scheduler
        return [config.scheduler for config in configs]

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """``loss.backward()`` for manual optimization, with the run's precision and strategy; extra arguments go to backward.

        ::

            class Manual(BoringModel):
                automatic_optimization = False

                def training_step(self, batch, batch_idx):
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(self(batch).pow(2).mean())
                    optimizer.step()

            trainer.fit(Manual(), loader)
        """
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
        """Let only ``optimizer``'s parameters require gradients, until :meth:`untoggle_optimizer`.

        ::

            class Gan(pl.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.automatic_optimization = False
                    self.generator, self.critic = torch.nn.Linear(4, 32), torch.nn.Linear(32, 1)

                def training_step(self, batch, batch_idx):
                    for_generator, for_critic = self.optimizers()
                    noise = torch.randn(len(batch), 4, device=self.device)
                    self.toggle_optimizer(for_generator)
                    self.manual_backward(-self.critic(self.generator(noise)).mean())  # no gradients for the critic
                    for_generator.step()
                    for_generator.zero_grad()
                    self.untoggle_optimizer(for_generator)
                    self.toggle_optimizer(for_critic)
                    self.manual_backward(self.critic(self.generator(noise)).mean() - self.critic(batch).mean())
                    for_critic.step()
                    for_critic.zero_grad()
                    self.untoggle_optimizer(for_critic)

                def configure_optimizers(self):
                    return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.critic)]

            trainer.fit(Gan(), loader)
        """
        self._param_requires_grad_state = take_requires_grad(_as_list(self.optimizers()), optimizer)

    def untoggle_optimizer(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Give parameters of the other optimizers the ``requires_grad`` back that they had before :meth:`toggle_optimizer`."""
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


def _as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def _clip_algorithm(algorithm: Any) -> Any:
    if not GradClipAlgorithmType.supported_type(str(algorithm).lower()):
        raise MisconfigurationException(
            f"`gradient_clip_algorithm` {algorithm} is invalid. Allowed algorithms: {GradClipAlgorithmType.supported_types()}."
        )
    return GradClipAlgorithmType(str(algorithm).lower())


def _fabric_clipping(value: int | float | None, algorithm: str | None) -> dict[str, Any]:
    return {"clip_val": value} if str(algorithm or "norm").lower() == "value" else {"max_norm": value}
