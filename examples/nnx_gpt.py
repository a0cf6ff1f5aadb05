"""The GPT of gpt.py in flax.nnx, trained on the same data by the same Trainer.

    python -m torch_compat examples/nnx_gpt.py --accelerator cpu --devices 8

``nnx_gpt.py --help`` lists the arguments.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lightning.pytorch as pl
import optax
from flax import nnx
from gpt import N_BYTES, StandardLibrary
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import xlatrain


class Block(nnx.Module):
    """Causal self-attention and a feed-forward layer, each after a LayerNorm and added to the input."""

    def __init__(self, width: int, n_heads: int, dropout: float, rngs: nnx.Rngs) -> None:
        init = {"kernel_init": nnx.initializers.normal(0.02), "rngs": rngs}
        self.n_heads = n_heads
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, **init)
        self.out = nnx.Linear(width, width, **init)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, **init)
        self.down = nnx.Linear(4 * width, width, **init)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)), approximate=False)))

    def attention(self, x: jax.Array) -> jax.Array:
        n, length, width = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(n, length, 3, self.n_heads, -1), 2, 0)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(n, length, width))


class GPT(xlatrain.JaxModule):
    """A decoder-only transformer over bytes with learned positions and a tied output layer."""

    def __init__(
        self, length: int = 128, width: int = 128, n_layers: int = 4, n_heads: int = 4, dropout: float = 0.0, lr: float = 1e-3
    ) -> None:
        rngs = nnx.Rngs(1)
        self.lr = lr
        self.tokens = nnx.Embed(N_BYTES, width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.positions = nnx.Embed(length, width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.blocks = nnx.List([Block(width, n_heads, dropout, rngs) for _ in range(n_layers)])
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [n, length, 256] for tokens, int32 [n, length]."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))

    def loss(self, batch: Any) -> jax.Array:
        tokens, targets = batch
        return optax.softmax_cross_entropy_with_integer_labels(self(tokens), targets).mean()

    def training_step(self, batch: Any, batch_idx: jax.Array) -> jax.Array:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: jax.Array) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        steps = max(int(self.trainer.estimated_stepping_batches), 41)
        rate = optax.warmup_cosine_decay_schedule(self.lr / 40, self.lr, 40, steps, 0.1 * self.lr)
        return optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", help="fsdp splits parameters")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4, help="windows per device")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--output", type=Path, default=Path("nnx_gpt_output"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    args = parser.parse_args()
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=1,
        limit_train_batches=args.steps,
        val_check_interval=min(args.steps, 50),
        limit_val_batches=8,
        log_every_n_steps=5,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.output, "{step}-{val_loss:.3f}", monitor="val_loss", save_last=True)],
        logger=CSVLogger(args.output, name="logs"),
    )
    data = StandardLibrary(args.length, args.batch_size, num_workers=0)
    trainer.fit(GPT(args.length, args.width, args.layers, dropout=args.dropout), data, ckpt_path="last" if args.resume else None)
    print(f"validation loss after {trainer.global_step} steps: {trainer.callback_metrics['val_loss'].item():.3f} nats per byte")
    print(f"unigram entropy of the same text: {data.unigram_entropy():.3f} nats per byte")


if __name__ == "__main__":
    main()
