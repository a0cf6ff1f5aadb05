"""Results of a training step for its optimizer. API: ``lightning.pytorch.loops.optimization``.

The compiled run does not go through these: they are for code that drives a step of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from torch_compat.step.optimization.automatic import AutomaticOptimization as _AutomaticOptimization  # noqa: F401
from torch_compat.step.optimization.manual import ManualOptimization as _ManualOptimization  # noqa: F401
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.memory import recursive_detach
from torch_compat.utilities.rank_zero import WarningCache
from torch_compat.utilities.types import STEP_OUTPUT

__all__ = ["AbstractClosure", "Closure", "ClosureResult", "ManualResult", "OutputResult"]


class OutputResult:
    """The result that a step gives the loop."""

    def asdict(self) -> dict[str, Any]:
        raise NotImplementedError


T = TypeVar("T", bound=OutputResult)


class AbstractClosure(ABC, Generic[T]):
    """A closure whose result stays until it is consumed: an optimizer may throw away what its closure returns."""

    def __init__(self) -> None:
        super().__init__()
        self._result: T | None = None

    def consume_result(self) -> T:
        """The result, once.

        Raises:
            MisconfigurationException: the closure was not called.
        """
        if self._result is None:
            raise MisconfigurationException(
                "The closure hasn't been executed. An `optimizer_step` hook passes it on,"
                " `optimizer.step(closure=optimizer_closure)`, and the optimizer's `step` calls it; or the hook calls it itself."
            )
        result, self._result = self._result, None
        return result

    @abstractmethod
    def closure(self, *args: Any, **kwargs: Any) -> T:
        """Do the work."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work, keep its result, and return what an optimizer wants."""


@dataclass
class ClosureResult(OutputResult):
    """The result of an automatically optimized step.

    Attributes:
        closure_loss: what is differentiated.
        loss: a detached copy, before it was divided for accumulation.
        extra: the other entries of the step's dict.
    """

    closure_loss: Tensor | None
    loss: Tensor | None = field(init=False, default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clone_loss()

    def _clone_loss(self) -> None:
        if self.closure_loss is not None:
            self.loss = self.closure_loss.detach().clone()

    @classmethod
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT, normalize: int = 1) -> Self:
        """The result of what ``training_step`` returned: a loss, a dict with one, or None.

        Args:
            normalize: what the loss is divided by, ``accumulate_grad_batches``.

        Raises:
            MisconfigurationException: something else.
        """
        loss: Tensor | None = None
        extra: dict[str, Any] = {}
        if isinstance(training_step_output, Mapping):
            loss = training_step_output.get("loss")
            if loss is None:
                raise MisconfigurationException(
                    "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
                )
            extra = {key: value for key, value in training_step_output.items() if key != "loss"}
        elif isinstance(training_step_output, Tensor):
            loss = training_step_output
        elif training_step_output is not None:
            raise MisconfigurationException(
                "In automatic optimization, `training_step` must return a Tensor, a dict, or None, which skips the batch;"
                f" found {type(training_step_output).__name__}"
            )
        if loss is not None:
            loss = loss / normalize  # not in place: it may be a leaf that the user keeps
        return cls(loss, extra=recursive_detach(extra))

    def asdict(self) -> dict[str, Any]:
        return {"loss": self.loss, **self.extra}


class Closure(AbstractClosure[ClosureResult]):
    """Forward, ``zero_grad`` and backward, for ``optimizer.step(closure)``.

    Args:
        step_fn: the forward pass.
        backward_fn: differentiates its loss.
        zero_grad_fn: clears gradients, between the two.
    """

    warning_cache = WarningCache()

    def __init__(
        self,
        step_fn: Callable[[], ClosureResult],
        backward_fn: Callable[[Tensor], None] | None = None,
        zero_grad_fn: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._step_fn = step_fn
        self._backward_fn = backward_fn
        self._zero_grad_fn = zero_grad_fn

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        output = self._step_fn()
        if output.closure_loss is None:
            self.warning_cache.warn("`training_step` returned `None`. If this was on purpose, ignore it: no update is made.")
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        if self._backward_fn is not None and output.closure_loss is not None:
            self._backward_fn(output.closure_loss)
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._result = self.closure(*args, **kwargs)
        return self._result.loss


@dataclass
class ManualResult(OutputResult):
    """The result of a manually optimized step.

    Attributes:
        extra: the step's dict; a lone loss as ``{"loss": loss}``. Detached.
    """

    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_training_step_output(cls, training_step_output: STEP_OUTPUT) -> Self:
        """The result of what ``training_step`` returned: a tensor, a dict or None.

        Raises:
            MisconfigurationException: something else.
        """
        extra: dict[str, Any] = {}
        if isinstance(training_step_output, Mapping):
            extra = dict(training_step_output)
        elif isinstance(training_step_output, Tensor):
            extra = {"loss": training_step_output}
        elif training_step_output is not None:
            raise MisconfigurationException(
                "In manual optimization, `training_step` must either return a Tensor or have no return; "
                f"found {type(training_step_output).__name__}"
            )
        if "loss" in extra:
            extra["loss"] = extra["loss"].detach()
        return cls(extra=extra)

    def asdict(self) -> dict[str, Any]:
        return self.extra
