"""``xlatrain fit``, ``validate``, ``test`` and ``predict``: a Trainer's methods for a module named on the command line.

Importing this loads neither torch nor JAX, so that ``xlatrain --help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerCommand:
    """A subcommand of ``xlatrain``: ``python -m torch_compat -m torch_compat.cli <name> …``."""

    name: str
    HELP: str

    def main(self, arguments: Sequence[str]) -> int:
        """Parse the arguments as ``LightningCLI`` does and run; returns 0, errors raise."""
        from torch_compat.__main__ import main

        sys.path.insert(0, "")  # the user's modules are found from the current folder, as with `python -m`
        main(["-m", "torch_compat.cli", self.name, *arguments])
        return 0


FIT = TrainerCommand("fit", "train a LightningModule: --config FILE, or --model CLASS …")
VALIDATE = TrainerCommand("validate", "one validation epoch, e.g. of a checkpoint")
TEST = TrainerCommand("test", "one test epoch")
PREDICT = TrainerCommand("predict", "predictions for the predict dataloader")
