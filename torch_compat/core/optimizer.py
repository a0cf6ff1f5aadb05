"""The optimizer as user code sees it in a run (``lightning.pytorch.core.optimizer``)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer

from torch_compat.utilities.exceptions import MisconfigurationException


def do_nothing_closure() -> None:
    """The closure of a ``step()`` that got none: forward and backward have run already."""


class WrappedOptimizer:
    """A torch optimizer with another ``step``: an instance of its class too, and every attribute read is the optimizer's own.

    Args:
        optimizer: the torch optimizer.
        prefix: what the name of the class begins with.
    """

    def __init__(self, optimizer: Optimizer, prefix: str) -> None:
        self._optimizer = optimizer
        # Schedulers and user code ask `isinstance(optimizer, torch.optim.SGD)`.
        inner = type(optimizer)
        self.__class__ = type(prefix + inner.__name__, (type(self), inner), {})  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's (the inherited one would fill attributes of the wrapper)."""
        self._optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped optimizer's."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self._optimizer.add_param_group(param_group)

    def __getattr__(self, item: str) -> Any:
        return getattr(self._optimizer, item)


class LightningOptimizer(WrappedOptimizer):
    """Wraps a torch optimizer so that ``step`` goes through the strategy (precision, hooks, step counting).

    It is an instance of the wrapped optimizer's class as well, and every attribute read is the wrapped optimizer's own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, "Lightning")
        self._strategy: Any | None = None
        self._on_before_step: Callable[[], None] = do_nothing_closure
        self._on_after_step: Callable[[], None] = do_nothing_closure

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer through the strategy.

        Args:
            closure: recomputes the loss and its gradients, as ``torch.optim.Optimizer.step`` takes it.
            **kwargs: passed on to the torch optimizer's ``step``.

        Returns:
            What the strategy's step returns: the closure's result.

        Raises:
            MisconfigurationException: ``closure`` cannot be called.
            RuntimeError: the optimizer belongs to no run.
        """
        if closure is None:
            closure = do_nothing_closure
        elif not callable(closure):
            raise MisconfigurationException(
                f"When `optimizer.step(closure)` is called, the closure should be callable, found {closure!r}"
            )
        self._on_before_step()
        if self._strategy is None:
            raise RuntimeError("This optimizer belongs to no run: call `step` on the torch optimizer (`.optimizer`) instead.")
        output = self._strategy.optimizer_step(self._optimizer, closure, **kwargs)
        self._on_after_step()
        return output

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Generator[None, None, None]:
        """Let only this optimizer's parameters require gradients in the block.

        Args:
            sync_grad: on a mesh gradients are global when they are computed; False saves nothing and changes no number.
        """
        assert self._strategy is not None
        module = self._strategy.lightning_module
        with module.toggled_optimizer(self):
            yield
