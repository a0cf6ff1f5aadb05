"""conformer: attention and convolution over a sequence."""

import recorder
import torch
from conformer import Conformer

recorder.seed()
net = torch.nn.Sequential(Conformer(dim=8, depth=2, dim_head=4, heads=2, ff_mult=2, conv_kernel_size=5), torch.nn.Linear(8, 4))
data = [torch.randn(32, 12, 8), torch.randint(0, 4, (32, 12))]
recorder.fit(net, lambda net, x, y: torch.nn.functional.cross_entropy(net(x).transpose(1, 2), y), data, batch_size=8)
