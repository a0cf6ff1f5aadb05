"""A vision transformer in flax.nnx with batch statistics and averaged weights: `python examples/nnx_vit.py [DEVICES]`."""

import sys

import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from nnx_digits import digits

import torch_compat as pl
import xlatrain
from torch_compat.callbacks import EMAWeightAveraging


class Block(nnx.Module):
    """Self-attention and a feed-forward layer, each after a LayerNorm and added to the input."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class ViT(xlatrain.JaxModule):
    """Patches of 3 × 1, normalised over the batch, and a transformer over them."""

    def __init__(self, rngs: nnx.Rngs, width: int = 32, n_layers: int = 2) -> None:
        self.embed = nnx.Linear(3, width, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(width, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (21, width)) * 0.02)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(n_layers)])
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = images.reshape(-1, 3, 3, 7).swapaxes(2, 3).reshape(-1, 21, 3)
        x = self.batch_norm(self.embed(patches)) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))

    def training_step(self, batch: tuple[jax.Array, jax.Array], batch_idx: jax.Array) -> jax.Array:
        images, labels = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self(images), labels).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[jax.Array, jax.Array], batch_idx: jax.Array) -> None:
        images, labels = batch
        self.log("accuracy", jnp.mean(self(images).argmax(-1) == labels), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(3e-3)


def main(devices: int = 1, epochs: int = 8) -> float:
    train = torch.utils.data.DataLoader(digits(2048, seed=0), 64 // devices, shuffle=True)
    val = torch.utils.data.DataLoader(digits(512, seed=1), 128 // devices)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False,
        callbacks=[EMAWeightAveraging(decay=0.98)],
    )  # fmt: skip
    trainer.fit(ViT(nnx.Rngs(0)), train, val)
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    print(f"accuracy of the averaged weights: {main(*map(int, sys.argv[1:])):.3f}")
