"""A multi-layer perceptron in flax.nnx that reads digits, drawn here with noise: `python examples/nnx_digits.py [DEVICES]`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import torch_compat as pl
import xlatrain

GLYPHS = [  # seven rows of five bits
    [14, 17, 19, 21, 25, 17, 14], [4, 12, 4, 4, 4, 4, 14], [14, 17, 1, 2, 4, 8, 31], [31, 2, 4, 2, 1, 17, 14],
    [2, 6, 10, 18, 31, 2, 2], [31, 16, 30, 1, 1, 17, 14], [6, 8, 16, 30, 17, 17, 14], [31, 1, 2, 4, 8, 8, 8],
    [14, 17, 17, 14, 17, 17, 14], [14, 17, 17, 15, 1, 2, 12],
]  # fmt: skip


def digits(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """Images, float32 [count, 9, 7], of digits somewhere in them, and the digits, int64 [count]."""
    draw = np.random.default_rng(seed)
    glyphs = (np.array(GLYPHS)[:, :, None] >> np.arange(4, -1, -1) & 1).astype(np.float32)
    labels = draw.integers(0, 10, count)
    images = draw.normal(0, 0.3, (count, 9, 7)).astype(np.float32)
    for image, label, (row, column) in zip(images, labels, draw.integers(0, 3, (count, 2)), strict=True):
        image[row : row + 7, column : column + 5] += glyphs[label]
    return torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


class Classifier(xlatrain.JaxModule):
    """Two layers with batch norm and dropout between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(63, 128, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(images.reshape(len(images), -1))))))

    def training_step(self, batch: tuple[jax.Array, jax.Array], batch_idx: jax.Array) -> jax.Array:
        images, labels = batch
        loss = optax.softmax_cross_entropy_with_integer_labels(self(images), labels).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[jax.Array, jax.Array], batch_idx: jax.Array) -> None:
        images, labels = batch
        self.log("accuracy", jnp.mean(self(images).argmax(-1) == labels), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(1e-2, int(self.trainer.estimated_stepping_batches)))


def main(devices: int = 1) -> float:
    train = torch.utils.data.DataLoader(digits(2048, seed=0), 64 // devices, shuffle=True)
    val = torch.utils.data.DataLoader(digits(512, seed=1), 128 // devices)
    trainer = pl.Trainer(max_epochs=5, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(nnx.Rngs(0)), train, val)
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    print(f"accuracy: {main(*map(int, sys.argv[1:])):.3f}")
