"""lightly: SimCLR's and Barlow Twins' losses over a small backbone."""

import recorder
import torch
from lightly.loss import BarlowTwinsLoss, NTXentLoss
from lightly.models.modules import BarlowTwinsProjectionHead, SimCLRProjectionHead

views = [torch.randn(64, 3, 16, 16), torch.randn(64, 3, 16, 16)]
for criterion, head in (
    (NTXentLoss(), SimCLRProjectionHead(16, 16, 8)),
    (BarlowTwinsLoss(), BarlowTwinsProjectionHead(16, 16, 8)),
):
    recorder.seed()
    backbone = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    model = torch.nn.Sequential(backbone, head)
    recorder.fit(model, lambda net, a, b, criterion=criterion: criterion(net(a), net(b)), views, batch_size=16)
