"""The part of a strategy that the steps of a run go through. API: ``lightning.pytorch.strategies.Strategy`` 2.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from torch_compat.plugins.precision import Precision
from torch_compat.step.mesh_run import MeshRun
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.types import STEP_OUTPUT

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule


class StrategySteps:
    """Steps, backward passes and updates: each member runs them in the run's own way, unless a subclass overrides it.

    What an override may do, and when it is called, says ``docs/compat/strategy_2.md``.
    """

    _mesh_run: MeshRun

    if TYPE_CHECKING:

        @property
        def lightning_module(self) -> LightningModule | None: ...

        @property
        def precision_plugin(self) -> Precision: ...

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's step. An override is captured: part of the compiled program."""
        assert self.lightning_module is not None
        return self.lightning_module.training_step(*args, **kwargs)

    def post_training_step(self) -> None:
        """Called after each training step, on the host."""

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run ``validation_step``, see :meth:`training_step`."""
        assert self.lightning_module is not None
        return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run ``test_step``, see :meth:`training_step`."""
        assert self.lightning_module is not None
        return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step``, see :meth:`training_step`."""
        assert self.lightning_module is not None
        return self.lightning_module.predict_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Gradients of the loss. An override is captured: what it makes of the loss before it calls this is differentiated.

        Args:
            closure_loss: the loss, divided by ``accumulate_grad_batches``.
            optimizer: the one that steps next; None in manual optimization.

        Returns:
            The loss, detached.
        """
        hooked = not self._mesh_run.gradients_only
        if hooked:
            self.pre_backward(closure_loss)
        self._differentiate(closure_loss, optimizer, *args, **kwargs)
        if hooked:
            self.post_backward(closure_loss)
        return closure_loss.detach()

    def _differentiate(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        if overrides(self.precision_plugin, "backward"):
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        else:
            self.run_backward(loss, *args, **kwargs)

    def run_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The run's own backward pass, which :meth:`backward` leads to.

        Raises:
            RuntimeError: no step of manual optimization runs.
        """
        if self._mesh_run.backward is None:
            raise RuntimeError("backward runs inside training_step of a run with manual optimization")
        self._mesh_run.backward(loss, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called before each backward's hooks, on the host, with the real loss."""
        self.precision_plugin.pre_backward(closure_loss, self.lightning_module)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called after each backward's hooks, on the host; gradients can be read and changed."""
        self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any) -> Any:
        """Step ``optimizer``: the closure (forward and backward), the hooks, clipping, the update.

        An override sees real gradients after it has called the closure. One that calls neither this nor the optimizer's ``step``
        leaves the parameters as they are.
        """
        return self.precision_plugin.optimizer_step(optimizer, model or self.lightning_module, closure, **kwargs)

    def make_update(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The run's own optimizer step, which :meth:`optimizer_step` leads to.

        Raises:
            RuntimeError: there is no run.
        """
        if self._mesh_run.step_optimizer is None:
            raise RuntimeError("an optimizer steps only inside of a run")
        return self._mesh_run.step_optimizer(optimizer, closure, **kwargs)

    def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clears gradients through the module's hook. (Era 1.3; 2.x documents none.)"""
        assert self.lightning_module is not None
        self.lightning_module.optimizer_zero_grad(current_epoch, batch_idx, optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, gradient_clip_algorithm: Any) -> None:
        """Clip gradients for ``LightningModule.clip_gradients``: the precision plugin's clipping."""
        self.precision_plugin.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def pre_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int = 0, **kwargs: Any) -> None:
        """Called before each real optimizer step, on the host. (Eras 1.x; 2.x documents none.)"""

    def post_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int = 0, **kwargs: Any) -> None:
        """Called after each real optimizer step, on the host. (Eras 1.x; 2.x documents none.)"""

    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int:
        """``global_step`` after an optimizer step; must be the same on every process. (Eras 1.4 and 1.5.)"""
        return current_global_step + 1

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the strategy accumulates gradients itself: False."""
        return False
