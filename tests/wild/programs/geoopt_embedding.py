"""geoopt: points of a Poincaré ball that Riemannian Adam moves."""

import geoopt
import lightning.pytorch as pl
import recorder
import torch
from torch.utils.data import DataLoader, TensorDataset

recorder.seed()


class Hyperbolic(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.ball = geoopt.PoincareBall()
        self.points = geoopt.ManifoldParameter(self.ball.random(20, 3, std=0.1), manifold=self.ball)

    def training_step(self, batch, _):
        a, b, near = batch
        distance = self.ball.dist(self.points[a], self.points[b])
        return torch.nn.functional.binary_cross_entropy_with_logits(1 - distance, near)

    def configure_optimizers(self):
        return geoopt.optim.RiemannianAdam(self.parameters(), lr=1e-2)


pairs = TensorDataset(torch.randint(0, 10, (64,)), torch.randint(10, 20, (64,)), torch.randint(0, 2, (64,)).float())
recorder.trainer(max_epochs=2).fit(Hyperbolic(), DataLoader(pairs, batch_size=8))
