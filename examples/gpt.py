"""A small byte-level GPT, trained on the source files of Python's standard library.

    python examples/gpt.py --help

An ordinary Lightning script: it runs as it is under Lightning (``python examples/gpt.py``) and on an XLA device mesh
(``python -m torch_compat examples/gpt.py --accelerator cpu --mesh 2 4``).
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

N_BYTES = 256


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``length`` consecutive bytes, and the same shifted by one: (input, target), int64 [length] each."""

    def __init__(self, data: Tensor, length: int) -> None:
        self.data = data
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.data[start : start + self.length + 1].long()
        return window[:-1], window[1:]


class StandardLibrary(pl.LightningDataModule):
    """The text of Python's standard library; every tenth file is held out for validation."""

    def __init__(self, length: int, batch_size: int, num_workers: int, max_bytes: int = 8_000_000) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.length = length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.max_bytes = max_bytes

    def setup(self, stage: str | None = None) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
        files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
        self.train_data = self.read([path for i, path in enumerate(files) if i % 10 != 0])
        self.val_data = self.read([path for i, path in enumerate(files) if i % 10 == 0])

    def read(self, files: list[Path]) -> Tensor:
        text = b"\n".join(path.read_bytes() for path in files)[: self.max_bytes]
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def unigram_entropy(self) -> float:
        """Cross entropy, in nats per byte, of the validation text under the byte frequencies of the training text."""
        frequencies = torch.bincount(self.train_data.long(), minlength=N_BYTES).double() + 1
        log_p = (frequencies / frequencies.sum()).log()
        return -log_p[self.val_data.long()].mean().item()

    def train_dataloader(self) -> DataLoader:
        return self.loader(self.train_data, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(self.val_data, shuffle=False)

    def loader(self, data: Tensor, shuffle: bool) -> DataLoader:
        windows = ByteWindows(data, self.length)
        return DataLoader(
            windows,
            self.batch_size,
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a LayerNorm and added to the input."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class GPT(pl.LightningModule):
    """A decoder-only transformer over bytes with learned positions and a tied output layer."""

    def __init__(
        self,
        length: int = 128,
        width: int = 128,
        n_layers: int = 4,
        n_heads: int = 4,
        dropout: float = 0.0,
        lr: float = 1e-3,
        warmup_steps: int = 40,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.length = length
        self.tokens = nn.Embedding(N_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, n_heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, N_BYTES, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [n, length, 256] for tokens, int64 [n, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        total, warmup = int(self.trainer.estimated_stepping_batches), self.hparams.warmup_steps

        def schedule(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, n_bytes: int, temperature: float = 0.7) -> str:
        """The prompt, continued by ``n_bytes`` sampled bytes."""
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(n_bytes):
            logits = self(tokens[:, -self.length :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1, help="how many, without --mesh")
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("DATA", "FSDP"), help="replicas × shards of the parameters")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--val-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--val-batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4, help="windows per device")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("gpt_output"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    pl.seed_everything(1)
    data = StandardLibrary(args.length, args.batch_size, args.num_workers)
    model = GPT(args.length, args.width, args.layers, dropout=args.dropout, lr=args.lr)
    placement: dict = {"devices": args.devices}
    if args.mesh:
        strategy = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=tuple(args.mesh))
        placement = {"devices": math.prod(args.mesh), "strategy": strategy}
    checkpoint = ModelCheckpoint(args.output / "checkpoints", "{step}-{val_loss:.3f}", monitor="val_loss", save_last=True)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        **placement,
        precision=args.precision,
        max_epochs=1,
        limit_train_batches=args.steps,
        val_check_interval=args.val_every,
        limit_val_batches=args.val_batches,
        log_every_n_steps=5,
        gradient_clip_val=1.0,
        callbacks=[checkpoint, LearningRateMonitor("step")],
        logger=CSVLogger(args.output, name="logs"),
    )
    trainer.fit(model, data, ckpt_path="last" if args.resume else None)

    summary = {
        "steps": trainer.global_step,
        "val_loss": trainer.callback_metrics["val_loss"].item(),
        "unigram_entropy": data.unigram_entropy(),
        "sample": model.eval().generate("def ", 400),
    }
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"\nSample of the trained model:\n{'-' * 80}\n{summary['sample']}\n{'-' * 80}")
    print(f"validation loss after {summary['steps']} steps: {summary['val_loss']:.3f} nats per byte")
    print(f"unigram entropy of the same text:  {summary['unigram_entropy']:.3f} nats per byte")


if __name__ == "__main__":
    main()
