"""torchvision: a small RetinaNet."""

import lightning.pytorch as pl
import recorder
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

recorder.seed()
backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 4, 1), nn.ReLU())
backbone.out_channels = 16
anchors = AnchorGenerator(sizes=((16, 32),), aspect_ratios=((1.0,),))
net = RetinaNet(backbone, num_classes=3, anchor_generator=anchors, min_size=64, max_size=64)


class Detector(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, _):
        return sum(self.net(*batch).values())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


def collate(rows):
    return [image for image, _ in rows], [target for _, target in rows]


data = []
for index in range(16):
    n = 1 + index % 2
    corner = torch.rand(n, 2) * 30
    data.append((torch.rand(3, 64, 64), {"boxes": torch.cat([corner, corner + 20], 1), "labels": torch.randint(1, 3, (n,))}))
recorder.trainer(max_epochs=2).fit(Detector(), DataLoader(data, batch_size=4, collate_fn=collate))
