"""piq: losses of pictures that compare structure, gradients and phase."""

import piq
import recorder
import torch
from torch import nn

recorder.seed()


def loss(net, x):
    y = torch.sigmoid(net(x))
    return piq.SSIMLoss(kernel_size=7)(y, x) + piq.total_variation(y) * 1e-3 + piq.gmsd(y, x) + 1 - piq.haarpsi(y, x)


recorder.fit(
    nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)),
    loss,
    [torch.rand(16, 3, 48, 48)],
    batch_size=8,
)
