"""e3nn: a tensor product of spherical harmonics."""

import recorder
import torch
from e3nn import o3

recorder.seed()


class Equivariant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "4x0e + 2x1o")
        self.out = o3.Linear("4x0e + 2x1o", "1x0e")

    def forward(self, x, r):
        return self.out(self.product(x, o3.spherical_harmonics("1x0e + 1x1o", r, normalize=True)))


data = [torch.randn(64, 10), torch.randn(64, 3), torch.randn(64, 1)]
recorder.fit(Equivariant(), lambda net, x, r, y: (net(x, r) - y).square().mean(), data, batch_size=16)
