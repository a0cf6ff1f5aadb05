"""Digits, drawn with noise, read by a flax.nnx module without torch: `python examples/nnx_alone.py [DEVICES [CHECKPOINT]]`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import xlatrain
from xlatrain.mesh.mesh import make_mesh

SEGMENTS = np.array([0x77, 0x24, 0x5D, 0x6D, 0x2E, 0x6B, 0x7B, 0x25, 0x7F, 0x6F])  # of a seven-segment display
EPOCHS, STEPS = 4, 32


class Classifier(xlatrain.JaxModule):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(7, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, segments):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(segments)))))

    def training_step(self, batch, batch_idx):
        loss = optax.softmax_cross_entropy_with_integer_labels(self(batch["segments"]), batch["digit"]).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", jnp.mean(self(batch["segments"]).argmax(-1) == batch["digit"]))

    def configure_optimizers(self):
        return optax.adamw(optax.cosine_decay_schedule(1e-2, EPOCHS * STEPS))


def batches(epoch, count=STEPS, seed=0):
    draw = np.random.default_rng((seed, epoch))
    for digits in draw.integers(0, 10, (count, 64)):
        lit = (SEGMENTS[digits, None] >> np.arange(7) & 1).astype(np.float32)
        yield {"segments": lit + draw.normal(0, 0.15, lit.shape).astype(np.float32), "digit": digits.astype(np.int32)}


def main(devices=1, checkpoint_path=None):
    jax.config.update("jax_num_cpu_devices", devices)  # has no effect on GPUs and TPUs
    val = list(batches(0, count=8, seed=1))
    mesh = make_mesh({"fsdp": devices}, jax.devices()[:devices])
    fitted = xlatrain.fit(Classifier, batches, val, max_epochs=EPOCHS, mesh=mesh, checkpoint_path=checkpoint_path, log=print)
    return fitted.metrics["accuracy"]


if __name__ == "__main__":
    print(f"accuracy: {main(*map(int, sys.argv[1:2]), *sys.argv[2:]):.3f}")
