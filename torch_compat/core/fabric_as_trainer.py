"""``self.trainer`` of a module that runs without one, under Fabric."""

from __future__ import annotations

from typing import Any


class FabricAsTrainer:
    """The members that Fabric has in common with the Trainer: ``self.trainer.global_rank``, ``is_global_zero``, ``print``, …

    Args:
        fabric: that set the module up.

    Raises:
        AttributeError: for what only a Trainer has.
    """

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._fabric, name):
            return getattr(self._fabric, name)
        raise AttributeError(
            f"Your LightningModule code tried to access `self.trainer.{name}` but it runs with Fabric, "
            f"which has only some of a Trainer's members. Test for `self.fabric`, or hand the "
            "value to the method.",
            name=name,
            obj=self,
        )
