"""A diffusion model of digits, a Linen module inside of a JaxModule: `python examples/nnx_diffusion.py [DEVICES]`."""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import torch
from flax import nnx
from nnx_digits import digits

import torch_compat as pl
import xlatrain

PIXELS = 63


class Denoiser(nn.Module):
    """The noise in images, float32 [n, 63], at times in 0 to 1, float32 [n]."""

    width: int = 256

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        waves = time[:, None] * jnp.pi * 2.0 ** jnp.arange(4)
        x = jnp.concatenate([x, jnp.sin(waves), jnp.cos(waves)], -1)
        for _ in range(2):
            x = nn.gelu(nn.Dense(self.width)(x))
        return nn.Dense(PIXELS)(x)


class Diffusion(xlatrain.JaxModule):
    """Learns to tell the noise that was added."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.net = nnx.bridge.ToNNX(Denoiser(), rngs=rngs)
        nnx.bridge.lazy_init(self.net, jnp.zeros((1, PIXELS)), jnp.zeros(1))
        self.draws = nnx.Rngs(noise=rngs.params())

    def loss(self, images: jax.Array) -> jax.Array:
        x = images.reshape(len(images), PIXELS)
        time = jax.random.uniform(self.draws.noise(), (len(x),))
        noise = jax.random.normal(self.draws.noise(), x.shape)
        signal = jnp.cos(time * jnp.pi / 2)[:, None]
        return jnp.mean((self.net(signal * x + jnp.sqrt(1 - signal**2) * noise, time) - noise) ** 2)

    def training_step(self, batch: tuple[jax.Array, jax.Array], batch_idx: jax.Array) -> jax.Array:
        loss = self.loss(batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[jax.Array, jax.Array], batch_idx: jax.Array) -> None:
        self.log("error", self.loss(batch[0]), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def main(devices: int = 1, epochs: int = 10) -> float:
    train = torch.utils.data.DataLoader(digits(2048, seed=0), 64 // devices, shuffle=True)
    val = torch.utils.data.DataLoader(digits(512, seed=1), 128 // devices)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)
    trainer.fit(Diffusion(nnx.Rngs(0)), train, val)
    return float(trainer.callback_metrics["error"])


if __name__ == "__main__":
    print(f"squared error of the noise, whose variance is 1: {main(*map(int, sys.argv[1:])):.3f}")
