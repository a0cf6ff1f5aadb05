"""The module and the optimizer that :func:`xlatrain.fit` is given, with all that it refuses of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optax
from flax import nnx

from xlatrain.step.jax_module import JaxModule
from xlatrain.step.jax_step import REFUSED, has, where

_PARTS = ("", "_epoch", "_batch")
_HOOKS = frozenset({
    *("on_fit_start", "on_fit_end", "on_save_checkpoint", "on_load_checkpoint"),
    *(f"on_{stage}{part}_{end}" for stage in ("train", "validation") for part in _PARTS for end in ("start", "end")),
})  # fmt: skip
_OF_THE_TRAINER = (
    *("prepare_data", "setup", "teardown", "configure_model", "configure_callbacks", "transfer_batch_to_device"),
    *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")),
)


def module_shapes(make_module: Callable[[nnx.Rngs], JaxModule]) -> Any:
    """The module, with shapes for arrays.

    Raises:
        TypeError: it is no JaxModule, has no ``training_step``, or overrides what is not called here.
    """
    if isinstance(make_module, nnx.Module):
        raise TypeError(
            f"xlatrain.fit: make_module is a {type(make_module).__name__}; expected a function of nnx.Rngs that makes one, so "
            f"that its parameters are born on their shards: pass {type(make_module).__name__}, or lambda rngs: "
            f"{type(make_module).__name__}(…)"
        )
    module = nnx.eval_shape(lambda: make_module(nnx.Rngs(0)))
    kind = type(module)
    if not isinstance(module, JaxModule) or not has(kind, "training_step"):
        raise TypeError(f"xlatrain.fit: make_module makes a {kind.__name__}; expected an xlatrain.JaxModule with a training_step")
    for reason, names in REFUSED.items():
        for name in names:
            if hasattr(kind, name):
                raise TypeError(f"{where(module, name)}: a JaxModule has no such method, it is {reason}")
    for name in dir(kind):
        if not has(kind, name) or name in _HOOKS or name.startswith(("on_test_", "on_predict_")):
            continue
        if name in _OF_THE_TRAINER or name.startswith(("on_before_", "on_after_")):
            raise TypeError(
                f"{where(module, name)}: xlatrain.fit does not call it. Make variables in __init__, give fit the batches, and "
                "prepare in on_fit_start; or use torch_compat.Trainer, which has it"
            )
    if not module.automatic_optimization:
        raise TypeError(f"{kind.__name__}.automatic_optimization is False: use xlatrain.step.engine with a loop of your own")
    return module


def optimizer_of(module: Any) -> Any:
    """Raises:
    TypeError: ``configure_optimizers`` gives no optax transformation.
    """
    found = module.configure_optimizers()
    if isinstance(found, Mapping) and set(found) == {"optimizer"}:
        found = found["optimizer"]
    if isinstance(found, optax.MultiSteps):
        found = found.gradient_transformation()
    if not isinstance(found, optax.GradientTransformation):
        raise TypeError(
            f"{where(module, 'configure_optimizers')} returned {type(found).__name__}; expected one optax transformation, with "
            "its schedules in it. Several optimizers are optax.multi_transform, by parameter"
        )
    return found
