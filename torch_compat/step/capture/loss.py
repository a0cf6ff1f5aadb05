"""The loss in what a training step returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_compat.step.host.host_future import HostFuture
from torch_compat.utilities.exceptions import MisconfigurationException, SetupRuntimeError
from torch_compat.utilities.rank_zero import WarningCache

_warnings = WarningCache()


def closure_loss(output: Any) -> torch.Tensor | None:
    """The loss in what ``training_step`` returned: a tensor, a mapping with ``"loss"``, or None to skip the batch.

    It keeps its shape, of one element.

    Raises:
        MisconfigurationException: anything else; where torch would raise a RuntimeError, it is one, too.
    """
    if output is None:
        _warnings.warn("`training_step` returned `None`. If this was on purpose, ignore it: no update is made.")
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if type(loss) is HostFuture and (made := loss.in_graph()) is not None:
        loss = made
    if type(loss) is HostFuture:
        reason = "the loss depends on this value, which is computed on the host (a torchmetrics result, .numpy(), …)"
        raise loss.refusal(reason, at_origin=True)
    if isinstance(output, Mapping) and "loss" not in output:
        raise MisconfigurationException(
            "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present; "
            f"its keys: {sorted(map(str, output))}. Return the loss, a dict with 'loss', or None to skip the batch"
        )
    if not isinstance(loss, torch.Tensor):
        raise MisconfigurationException(
            "In automatic optimization, `training_step` must return a Tensor, a dict, or None: a scalar tensor (the loss), a "
            f"dict that has it as 'loss', or None to skip the batch; it returned {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise SetupRuntimeError(
            f"grad can be implicitly created only for scalar outputs, and the loss returned by training_step has shape "
            f"{tuple(loss.shape)}; expected a single number: reduce it, e.g. "
            "loss.mean()"
        )
    return loss


def outputs_with(loss: Any, output: Any) -> dict[Any, Any]:
    """The ``outputs`` of hooks: the loss first, then what else is in a mapping that ``training_step`` returned."""
    others = {key: value for key, value in output.items() if key != "loss"} if isinstance(output, Mapping) else {}
    return {"loss": loss, **others}
