"""A raw loop with Fabric, compiled whole: ``python -m torch_compat examples/fabric_loop.py --devices 8``; also under stock."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=args.strategy)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    with fabric.init_module():
        module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), 3e-3))
    x = torch.randn(512, 16)
    data = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64 // args.devices, shuffle=True))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if hasattr(fabric, "compile"):  # stock Fabric has none
        step = fabric.compile(step)
    for epoch in range(args.epochs):
        losses = [step(batch) for batch in loader]
        fabric.print(f"epoch {epoch}: loss {torch.stack([loss.detach() for loss in losses]).mean():.4f}")
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model, "optimizer": optimizer, "epoch": args.epochs}
        path = Path(fabric.broadcast(folder)) / "last.ckpt"
        fabric.save(path, state)
        fabric.load(path, state)
    fabric.print(f"saved and loaded after {state['epoch']} epochs")


if __name__ == "__main__":
    main()
