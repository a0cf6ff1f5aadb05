"""``ModelPruning``: refused by name."""

from __future__ import annotations

from typing import Any

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException


class ModelPruning(Callback):
    """Pruning; not supported: ``torch.nn.utils.prune`` replaces parameters in training, but a compiled run places them once.

    Raises:
        MisconfigurationException: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MisconfigurationException(
            "ModelPruning is not supported: torch.nn.utils.prune replaces parameters (weight → weight_orig and weight_mask)"
            " between epochs, and a compiled run places the module's parameters once. Keep a mask in a buffer"
            " (self.register_buffer('mask', torch.ones_like(self.layer.weight))), multiply by it in forward, and change it in"
            " place in on_train_epoch_end."
        )
