"""Runs of a :class:`xlatrain.JaxModule`: what the loop sees of it, and what of a Trainer is about torch modules alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from torch_compat.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch_compat.callbacks.finetuning import BaseFinetuning
from torch_compat.callbacks.pruning import ModelPruning
from torch_compat.core.module import LightningModule
from torch_compat.strategies.on_device import DeviceStrategy
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch_compat.core.jax_host import JaxHost
    from torch_compat.trainer.trainer import Trainer

PRECISIONS = ("32-true", "bf16-true", "16-true")
EIGHT_BITS = ("int8-mixed", "float8-mixed", "transformer-engine")
REFUSED_CALLBACKS: dict[type, str] = {
    BackboneFinetuning: "it freezes torch modules; use optax.multi_transform with optax.set_to_zero()",
    BaseFinetuning: "it freezes torch modules; use optax.multi_transform with optax.set_to_zero()",
    ModelPruning: "torch.nn.utils.prune knows torch modules only; multiply by a mask that is an nnx variable",
    StochasticWeightAveraging: (
        "it computes the statistics of torch's batch norm layers anew, and knows none of nnx; use WeightAveraging or "
        "EMAWeightAveraging, with a schedule in the optax transformation"
    ),
}
"""Callbacks that need a torch module or its optimizers, each with the reason."""
_OPTIONS = ("remat", "offload_activations", "tensor_parallel_plan")


def lightning_module(model: Any) -> Any:
    """``model``, or the LightningModule that the loop sees of a :class:`xlatrain.JaxModule`."""
    kinds = sys.modules.get("xlatrain.step.jax_module")  # whoever made one has imported it
    if kinds is None or not isinstance(model, kinds.JaxModule):
        return model
    from torch_compat.core.jax_host import hosted

    return hosted(model)


def advice_on(model: Any) -> str:
    """The next step for whoever gave a run an ``nnx`` module that has no steps, or a class; else empty."""
    nnx = sys.modules.get("flax.nnx")
    if isinstance(model, type):
        return f", the class itself: give an instance, {model.__name__}(…)"
    if nnx is not None and isinstance(model, nnx.Module):
        return (
            ", an nnx.Module without steps: derive it from xlatrain.JaxModule, and define training_step and configure_optimizers"
        )
    return ""


def is_jax_class(kind: Any) -> bool:
    """Whether ``kind`` is a class of JAX modules."""
    kinds = sys.modules.get("xlatrain.step.jax_module")
    return kinds is not None and isinstance(kind, type) and issubclass(kind, kinds.JaxModule)


def jax_host(module: Any) -> JaxHost | None:
    """``module``, if it stands for a :class:`xlatrain.JaxModule`."""
    hosts = sys.modules.get("torch_compat.core.jax_host")
    return module if hosts is not None and isinstance(module, hosts.JaxHost) else None


def check_loaders(module: Any, loaders: Iterable[Any], name: str) -> None:
    """Refuse arrays among a JAX module's loaders: whoever passes a list of batches, as ``xlatrain.fit`` takes it.

    Raises:
        MisconfigurationException: a list is several loaders, and a batch is none.
    """
    if jax_host(module) is not None and any(isinstance(one, np.ndarray | jax.Array) for one in loaders):
        raise MisconfigurationException(
            f"{name}: found arrays, expected loaders. To the Trainer a list is several loaders, as in Lightning, and not one of "
            "batches: give it a DataLoader, or an object with __iter__ (and __len__) that yields the batches"
        )


def check_run(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what a run would need of a torch module, where ``module`` is none.

    Raises:
        MisconfigurationException: by name.
    """
    if jax_host(module) is None:
        return
    name = f"{type(module).__name__}, a JaxModule"
    strategy = trainer.strategy
    if isinstance(strategy, DeviceStrategy):
        raise MisconfigurationException(
            f"strategy={type(strategy).__name__} lets torch drive the devices, and {name}, is compiled by JAX: "
            "use 'auto' or 'mesh'"
        )
    if trainer.precision in EIGHT_BITS:
        raise MisconfigurationException(
            f"precision={trainer.precision!r} chooses among linear layers of torch, and {name}, has none: choose it in nnx, with "
            "qwix.quantize_model(module, qwix.QtProvider([qwix.QtRule(…)]), …) before it is given to the Trainer"
        )
    if trainer.precision not in PRECISIONS:
        raise MisconfigurationException(
            f"precision={trainer.precision!r} does not work with {name}: expected one of {', '.join(PRECISIONS)}. Choose mixed "
            "precision in nnx: dtype=jnp.bfloat16 computes, param_dtype=jnp.float32 keeps"
        )
    for option in _OPTIONS:
        if getattr(strategy, option, None) not in (None, "auto", [], ()):
            raise MisconfigurationException(
                f"{type(strategy).__name__}({option}=…) names torch modules, and not the layers of {name}: use nnx.remat around "
                "layers, and sharding rules or nnx.with_partitioning for parameters"
            )
    for callback in trainer.callbacks:
        for kind, reason in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise MisconfigurationException(f"{type(callback).__name__} does not work with {name}: {reason}")
