"""Trains with callbacks and loggers on every process of a world; `test_processes.py` looks at what is left."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch_compat as pl
from tests.torch_compat.callbacks import fit_script
from torch_compat.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer, TQDMProgressBar
from torch_compat.loggers import CSVLogger, TensorBoardLogger


def main(root: str) -> None:
    best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last="link")
    timed = ModelCheckpoint(os.path.join(root, "timed"), train_time_interval=timedelta(0), save_top_k=-1)
    callbacks = [best, timed, EarlyStopping("val_loss"), Timer("00:01:00:00"), LearningRateMonitor(), TQDMProgressBar()]
    run = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        default_root_dir=root,
        log_every_n_steps=1,
        callbacks=callbacks,
        logger=[CSVLogger(root), TensorBoardLogger(root)],
    )
    run.fit(fit_script.make_module(pl), fit_script.loader(8), fit_script.loader(4))
    assert best.best_model_score is not None and timed.dirpath is not None
    saved = sum(name.endswith(".ckpt") for name in os.listdir(timed.dirpath))  # beside it lies process 0's claim, for a moment
    told = {"best": best.best_model_path, "score": float(best.best_model_score), "timed": saved}
    with open(os.path.join(root, f"told-{run.node_rank}.json"), "w") as file:
        json.dump({**told, "log_dir": run.log_dir, "steps": run.global_step}, file)


if __name__ == "__main__":
    main(sys.argv[1])
