"""A GPT on one GPU (or ``--platform cpu``): the Trainer's step through JAX, and in turn plain torch's on the same device."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from gpt import GPT, make_batches
from interleaved import Interleaved, Lane, write
from torch import Tensor
from torch.utils.data import DataLoader

_TORCH_DEVICE = {"gpu": "cuda", "cpu": "cpu"}


def torch_lane(model: GPT, device: str, *, half: bool) -> Lane:
    """Eager torch without any trainer."""
    model = copy.deepcopy(model).to(device)
    optimizer = model.configure_optimizers()

    def step(batch: Sequence[Tensor]) -> float:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            loss = model.loss([tensor.to(device) for tensor in batch])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", choices=tuple(_TORCH_DEVICE), default="gpu")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--lanes", nargs="*", default=[], choices=["torch"])
    for name, value in {"steps": 30, "layers": 8, "width": 768, "heads": 12, "length": 512, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    model = GPT(args.layers, args.width, args.heads, args.length)
    data = make_batches(args.steps, args.batch, args.length)
    half = args.precision == "bf16-mixed"
    timing = Interleaved(list(DataLoader(data, args.batch)))
    trainer = pl.Trainer(
        accelerator=args.platform,
        devices=1,
        precision=args.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timing],
    )
    for name in args.lanes:
        timing.add(name, torch_lane(model, _TORCH_DEVICE[args.platform], half=half))
    trainer.fit(model, DataLoader(data, args.batch))
    write(args.out, timing.result())


if __name__ == "__main__":
    main()
