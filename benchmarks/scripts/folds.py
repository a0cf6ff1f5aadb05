"""Processor time of each fold of a cross-validation: ``fit`` of three steps, ``predict`` of three batches, a module for each."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import argparse
from typing import Any

import torch
from interleaved import parse_args, quiet_trainer, write
from models import Batches, seconds
from zoo import ZOO


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(ZOO), required=True)
    parser.add_argument("--folds", type=int, default=4)
    args = parse_args(parser)
    torch.set_num_threads(1)
    rows: list[Any] = []
    for fold in range(args.folds):
        torch.manual_seed(fold)
        module, batch = ZOO[args.model]()
        loader = torch.utils.data.DataLoader(Batches(batch, 3), batch_size=None)
        trainer = quiet_trainer(max_epochs=1)
        began = seconds()
        trainer.fit(module, loader)
        fitted = seconds()
        found: Any = trainer.predict(module, loader)
        total = float(sum(one.double().sum() for one in found))
        rows.append({"fit_s": fitted - began, "predict_s": seconds() - fitted, "sum": total})
    write(args.out, {"folds": rows})


if __name__ == "__main__":
    main()
