"""pytorch-msssim: an autoencoder by structural similarity."""

import recorder
import torch
from pytorch_msssim import SSIM

recorder.seed()
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 3, padding=1))
ssim = SSIM(data_range=1.0, size_average=True, channel=3)
recorder.fit(net, lambda net, x: 1 - ssim(net(x).sigmoid(), x), [torch.rand(32, 3, 24, 24)], batch_size=8)
