"""``SaveConfigCallback``: keeps the configuration of a run beside its logs. API: ``lightning.pytorch.cli``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.overridden import is_overridden
from torch_compat.cli.parser import LightningArgumentParser
from torch_compat.utilities.cloud_io import get_filesystem

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class SaveConfigCallback(Callback):
    """Writes the configuration to the Trainer's ``log_dir`` when the first stage starts; process 0 writes.

    Args:
        parser: what parsed the configuration.
        config: the configuration.
        config_filename: file name in the log directory.
        overwrite: whether a file that is there already may be replaced.
        multifile: whether a configuration that came from several files is saved as several.
        save_to_log_dir: False where only :meth:`save_config` shall save it.

    Raises:
        RuntimeError: when the run starts: the file exists, and ``overwrite`` is False.
        ValueError: ``save_to_log_dir=False``, and ``save_config`` is not overridden.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if not save_to_log_dir and not is_overridden("save_config", self, SaveConfigCallback):
            raise ValueError(
                f"`{type(self).__name__}(save_to_log_dir=False)` saves nothing: override `save_config` in a subclass, or pass"
                " `save_config_callback=None` to `LightningCLI`."
            )
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._save_to_log_dir(trainer)
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
            self.already_saved = True
        # What process 0 did decides for all: `save_config` may have raised, or reset it.
        self.already_saved = trainer.strategy.broadcast(self.already_saved)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Override to save the configuration elsewhere too, e.g. as a logger's hyperparameter.

        Called on process 0 only: a collective in it would wait for the others forever.
        """

    def _save_to_log_dir(self, trainer: Trainer) -> None:
        folder = trainer.log_dir  # collective
        assert folder is not None
        path = os.path.join(folder, self.config_filename)
        filesystem = get_filesystem(folder)
        exists = trainer.is_global_zero and not self.overwrite and filesystem.isfile(path)
        if trainer.strategy.broadcast(exists):
            raise RuntimeError(
                f"{type(self).__name__} expected {path} to NOT exist. It is the configuration of an earlier run. Delete it, "
                "replace it"
                ' with `LightningCLI(save_config_kwargs={"overwrite": True})`, or save none with'
                " `LightningCLI(save_config_callback=None)`."
            )
        if trainer.is_global_zero:
            filesystem.makedirs(folder, exist_ok=True)  # the logger has not written anything yet
            self.parser.save(self.config, path, skip_unset=False, overwrite=self.overwrite, multifile=self.multifile)
