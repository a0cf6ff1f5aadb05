"""Time from the first batch to the end of its step (capture, trace, compile) of GPTs of growing depth."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
from gpt import GPT, jax_lane, make_batches
from interleaved import Interleaved, quiet_trainer, write
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--lanes", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    first: dict[str, dict[int, float]] = {}
    for n_layers in args.layers:
        pl.seed_everything(0, verbose=False)
        model = GPT(n_layers, width=64, n_heads=4, length=32)
        data = make_batches(2, batch=4, length=32)
        loader = DataLoader(data, 4)
        timing = Interleaved(list(loader), {name: {"jax": jax_lane}[name](model) for name in args.lanes})
        quiet_trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[timing]).fit(model, loader)
        for name, seconds in timing.result(warm_up=1)["first_s"].items():
            first.setdefault(name, {})[n_layers] = seconds
    write(args.out, {"first_s": first})


if __name__ == "__main__":
    main()
