"""Steps of a model on one GPU (or ``--platform cpu``): under ``torch_compat``, or under stock Lightning, as it is or compiled."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from gpt import GPT
from interleaved import parse_args, write
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

WARM_UP = 5
WORDS = 256
SIZES = {"full": (8, 768, 12, 512, 16), "tiny": (2, 64, 4, 32, 2)}
"""Layers, width, heads, length and rows of a batch."""

Made = tuple[pl.LightningModule, tuple[Tensor, ...]]


class Repeated(Dataset):
    """One batch again and again: what is measured is no loader."""

    def __init__(self, batch: tuple[Tensor, ...], count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batch


def gpt(size: str) -> Made:
    layers, width, heads, length, rows = SIZES[size]
    tokens = torch.randint(WORDS, (rows, length + 1))
    return GPT(layers, width, heads, length), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class Bert(pl.LightningModule):
    """Hugging Face's, without dropout; rows of other lengths, so attention has a mask of the batch."""

    def __init__(self, size: str) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        layers, width, heads, length, _ = SIZES[size]
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        shape = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
        self.net = BertForMaskedLM(BertConfig(vocab_size=8192, max_position_embeddings=length, **shape, **off))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        tokens, mask = batch
        return self.net(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def bert(size: str) -> Made:
    _, _, _, length, rows = SIZES[size]
    lengths = torch.linspace(length // 2, length, rows).long()
    mask = (torch.arange(length) < lengths[:, None]).long()
    return Bert(size), (torch.randint(8192, (rows, length)), mask)


class ResNet(pl.LightningModule):
    """Hugging Face's ResNet-50."""

    def __init__(self, size: str) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        small = {"depths": [1, 1, 1, 1], "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32]} if size == "tiny" else {}
        self.net = ResNetForImageClassification(ResNetConfig(num_labels=1000, **small))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images).logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def resnet(size: str) -> Made:
    rows, side = (64, 224) if size == "full" else (2, 64)
    return ResNet(size), (torch.randn(rows, 3, side, side), torch.randint(1000, (rows,)))


MODELS: dict[str, Callable[[str], Made]] = {"gpt": gpt, "bert": bert, "resnet": resnet}


class Clock(pl.Callback):
    """Seconds of the first step, and of all after the warm-up, whose last loss is waited for."""

    def __init__(self) -> None:
        self.first = self.rest = self._began = 0.0
        self.losses: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"])
        if batch_idx in (0, WARM_UP):
            float(outputs["loss"])
            now = time.perf_counter()
            self.first = self.first or now - self._began
            self._began = now

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        float(self.losses[-1])
        self.rest = time.perf_counter() - self._began


def peak_gb(platform: str) -> float:
    """The most memory of the device that arrays held at one time, as its allocator counts it; 0 on a CPU."""
    if platform == "cpu":
        return 0.0
    if "torch_compat" in sys.modules:
        import jax

        return jax.local_devices(backend="cuda")[0].memory_stats()["peak_bytes_in_use"] / 1e9
    return torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=tuple(MODELS), required=True)
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, under stock Lightning")
    args = parse_args(parser)
    pl.seed_everything(0, verbose=False)
    model, batch = MODELS[args.model](args.size)
    clock, silent = Clock(), {"logger": False, "enable_checkpointing": False}
    silent |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator=args.platform, devices=1, precision=args.precision, max_epochs=1, callbacks=[clock], **silent
    )
    steps = 1 + WARM_UP + args.steps
    trainer.fit(torch.compile(model) if args.compile else model, DataLoader(Repeated(batch, steps), batch_size=None))
    found = {"ms": 1e3 * clock.rest / args.steps, "first_s": clock.first, "peak_gb": peak_gb(args.platform)}
    write(args.out, {**found, "steps": args.steps, "losses": [float(loss) for loss in clock.losses]})


if __name__ == "__main__":
    main()
