"""lightly: BYOL with a momentum encoder, as its own example for Lightning trains it."""

import copy

import lightning.pytorch as pl
import recorder
import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch.utils.data import DataLoader, TensorDataset


class BYOL(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
        )
        self.projection_head = BYOLProjectionHead(32, 16, 8)
        self.prediction_head = BYOLPredictionHead(8, 16, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 3, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x0, x1 = batch
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


data = TensorDataset(torch.randn(32, 3, 16, 16), torch.randn(32, 3, 16, 16))
recorder.seed()
recorder.trainer(max_epochs=3).fit(BYOL(), DataLoader(data, batch_size=8))
