"""A fit of two processes; a bit flips on the last device of the second one, in a parameter that every device has."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import torch_compat as pl
from tests.torch_compat.callbacks.flipped_bits import flipped
from torch_compat.callbacks import ModelCheckpoint, SilentDataCorruptionCheck
from torch_compat.demos.boring_classes import BoringModel, RandomDataset
from xlatrain.cluster import distributed
from xlatrain.step.replicas import SilentDataCorruptionError


class Flip(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 3:
            placed = trainer.strategy.placed
            assert placed is not None
            weight = flipped(placed.state.params["layer.weight"], 2048)  # ids of process 1 begin there
            placed.state = replace(placed.state, params={**placed.state.params, "layer.weight": weight})


directory = Path(sys.argv[1])
world = distributed.initialize()
saver = ModelCheckpoint(directory / "saved", every_n_train_steps=2, save_top_k=-1)
trainer = pl.Trainer(
    accelerator="cpu", devices=2, num_nodes=2, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Flip(), SilentDataCorruptionCheck(100), saver],
)  # fmt: skip
try:
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(RandomDataset(32, 32), batch_size=1))
    said = "nothing"
except SilentDataCorruptionError as error:
    said = str(error)
saved = sorted(one.name for one in (directory / "saved").glob("*.ckpt"))
(directory / f"{world.process_id}.json").write_text(json.dumps({"said": said, "saved": saved}))
