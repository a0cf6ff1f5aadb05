"""The optimizers of a user's module as pure functions of arrays, and what user code sees of them meanwhile."""

from torch_compat.step.optimizers.forms import functional_form
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.optax_optimizer import OptaxOptimizer

__all__ = ["FunctionalOptimizer", "OptaxOptimizer", "functional_form"]
