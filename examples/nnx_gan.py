"""A GAN of digits, both parts in flax.nnx, each with its own torch optimizer: `python examples/nnx_gan.py [DEVICES]`.

A JaxModule has one optax transformation. Optimizers that take turns are a LightningModule's, whose layers may be nnx modules.
"""

import sys

import jax
import torch
from flax import nnx
from nnx_digits import digits
from torch.nn.functional import binary_cross_entropy_with_logits

import torch_compat as pl

NOISE, PIXELS = 16, 63


class Layers(nnx.Module):
    """Two linear layers."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(inputs, 128, rngs=rngs)
        self.outer = nnx.Linear(128, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(nnx.leaky_relu(self.inner(x)))


class GAN(pl.LightningModule):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = pl.jax_module(Layers(NOISE, PIXELS, nnx.Rngs(0)))
        self.discriminator = pl.jax_module(Layers(PIXELS, 1, nnx.Rngs(1)))

    def said(self, images: torch.Tensor, real: float) -> torch.Tensor:
        """The loss of the discriminator's answer where ``real`` is the right one."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        generates, discriminates = self.optimizers()
        images = batch[0].flatten(1)
        made = self.generator(torch.randn(len(images), NOISE, device=self.device))
        found = self.said(images, 1.0) + self.said(made.detach(), 0.0)
        discriminates.zero_grad()
        self.manual_backward(found)
        discriminates.step()
        fooled = self.said(made, 1.0)
        generates.zero_grad()
        self.manual_backward(fooled)
        generates.step()
        self.log_dict({"discriminator": found, "generator": fooled}, prog_bar=True)
        self.log("mean", made.mean())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)) for part in parts]


def main(devices: int = 1, epochs: int = 10) -> float:
    pl.seed_everything(1)
    train = torch.utils.data.DataLoader(digits(2048, seed=0), 64 // devices, shuffle=True)
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False)
    trainer.fit(GAN(), train)
    return float(trainer.callback_metrics["mean"])


if __name__ == "__main__":
    print(f"mean of the generated pixels, 0.23 in the data: {main(*map(int, sys.argv[1:])):.2f}")
