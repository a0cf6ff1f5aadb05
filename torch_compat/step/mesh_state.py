"""The state of a run in a checkpoint besides the module and the optimizers: loss scaling and random streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from torch_compat.step.run_context import RunContext
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_arrays import host_value
from xlatrain.step.loss_scale import LossScaler


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Compare the optimizers of a run with those of a checkpoint.

    Raises:
        MisconfigurationException: the checkpoint has more or fewer, or the options of one are those of another kind. Torch would
            take its groups as they are, and miss an option at the first step.
    """
    if len(states) != len(optimizers):
        raise MisconfigurationException(
            f"the checkpoint has the state of {len(states)} optimizers, configure_optimizers returned {len(optimizers)}"
        )
    for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        stored = {name for group in state.get("param_groups", ()) for name in group} - {"params"}
        defaults = getattr(optimizer, "defaults", {})  # one that wraps another may have none
        missing, foreign = sorted(defaults.keys() - stored), sorted(stored - defaults.keys())
        if stored and missing and foreign:  # options alone that came or went are for the optimizer's own `__setstate__`
            raise MisconfigurationException(
                f"optimizer {index} of configure_optimizers is {type(optimizer).__name__}, but its state in the checkpoint has "
                f"the options {', '.join(foreign)} and not {', '.join(missing)}: it is another optimizer's. Return the one that "
                "was saved; or begin with the weights alone: load_from_checkpoint, and fit without ckpt_path"
            )


def loss_scale_state(run: RunContext) -> dict[str, Any]:
    """State of dynamic loss scaling, as ``torch.amp.GradScaler`` has it; empty without."""
    scaler, model = run.scaler, run.strategy.placed
    if (scaling := run.executor.loss_scaling) is not None:  # steps run eagerly
        return scaling.state_dict()
    if scaler is None or model is None or not model.state.loss_scale:
        return {}
    return scaler.state_dict(jax.tree.map(host_value, model.state.loss_scale))


def load_loss_scale_state(run: RunContext, state: Mapping[str, Any]) -> None:
    """Continue the loss scaling of a checkpoint."""
    if (scaling := run.executor.loss_scaling) is not None:
        scaling.load_state_dict(state)
    elif run.scaler is not None and run.strategy.placed is not None:
        run.precision_plugin.scaler, loss_scale = LossScaler.from_state_dict(state)
        run.strategy.placed.scale_loss(loss_scale)


def random_state(run: RunContext) -> dict[str, Any]:
    """The streams of compiled steps."""
    model = run.strategy.placed
    if model is None:
        return run.executor.random_state()
    return {
        "key": np.asarray(model.state.key.addressable_data(0)).tolist(),
        "draws": int(model.state.draws.addressable_data(0)),
    }


def load_random_state(run: RunContext, state: Mapping[str, Any]) -> None:
    """Continue the streams of compiled steps of a checkpoint."""
    model = run.strategy.placed
    if model is None:
        run.executor.load_random_state(state)
    elif "key" in state:  # else of a run on torch's own devices, whose stream goes on there only
        model.set_streams(state["key"], state["draws"])
