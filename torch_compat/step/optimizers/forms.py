"""The functional form of an optimizer: its class's update rule, optax's transformation, or its own ``step()``."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_compat.step.optimizers.captured import CapturedOptimizer
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer, refuse_pre_hooks
from torch_compat.step.optimizers.inline import InlineOptimizer, members_of
from torch_compat.step.optimizers.optax_optimizer import FunctionalOptax, OptaxOptimizer
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.optimizers.table import TableOptimizer, has_rule
from torch_compat.step.values.mocks import stands_in

_REFUSED = {
    torch.optim.LBFGS: "it evaluates its closure several times in one step, as often as the line search wants",
    torch.optim.SparseAdam: "it needs sparse gradients, and XLA has only dense ones",
}
_INSTEAD = {
    torch.optim.LBFGS: "use a first-order optimizer such as torch.optim.AdamW",
    torch.optim.SparseAdam: "use torch.optim.Adam and nn.Embedding(sparse=False)",
}


def functional_form(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> FunctionalOptimizer:
    """The functional form of ``optimizer``.

    One that is exactly of a class of ``torch.optim`` is mapped to the same update in JAX, a transformation of optax is used
    as it is; the ``step()`` of any other is captured.

    Args:
        optimizer: stays the user's: its ``param_groups`` are read every step, its state through
            :meth:`~FunctionalOptimizer.import_state` and :meth:`~FunctionalOptimizer.export_state`. Its options ``foreach``,
            ``fused`` and ``capturable`` choose among implementations of the same update and have no effect here.
        names: parameter → its name in the module, for every parameter of the optimizer.

    Raises:
        UnsupportedOptimizerError: an optimizer that needs the eager executor (L-BFGS, SparseAdam, ``differentiable=True``),
            or has a parameter that is not in ``names``.
    """
    _refuse(optimizer)
    if type(optimizer) is OptaxOptimizer:
        return FunctionalOptax(optimizer, names)
    return (TableOptimizer if has_rule(optimizer) else CapturedOptimizer)(optimizer, names)


def form_in_step(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> FunctionalOptimizer:
    """The form of an optimizer that :func:`functional_form` refuses, and whose Python may run in a captured step.

    Raises:
        UnsupportedOptimizerError: as :func:`functional_form`, of it and of the optimizers that it holds.
    """
    for member in members_of(optimizer):
        _refuse(member)
    return InlineOptimizer(optimizer, names)


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} cannot run inside a compiled step: {reason}; {_INSTEAD[kind]}, or "
                "run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )
    for name in ("step", "zero_grad"):
        if stands_in(getattr(optimizer, name)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__}.{name} is a mock (unittest.mock), which counts calls that a compiled step does "
                "not make: steps run one by one"
            )
    refuse_pre_hooks(optimizer)
