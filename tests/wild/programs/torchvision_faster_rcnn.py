"""torchvision: a small Faster R-CNN."""

import lightning.pytorch as pl
import recorder
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

recorder.seed()
backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 4, 1), nn.ReLU())
backbone.out_channels = 16
net = FasterRCNN(
    backbone, num_classes=3, rpn_anchor_generator=AnchorGenerator(sizes=((16, 32),), aspect_ratios=((1.0,),)),
    box_roi_pool=MultiScaleRoIAlign(featmap_names=["0"], output_size=3, sampling_ratio=2), min_size=64, max_size=64,
)  # fmt: skip


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
for _ in range(8):
    corner = torch.rand(2, 2) * 30
    data.append((torch.rand(3, 64, 64), {"boxes": torch.cat([corner, corner + 20], 1), "labels": torch.randint(1, 3, (2,))}))
recorder.trainer(max_epochs=2).fit(Detector(), DataLoader(data, batch_size=4, collate_fn=collate))
