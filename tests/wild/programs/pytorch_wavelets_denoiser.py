"""pytorch-wavelets: a network between a wavelet transform and its inverse."""

import recorder
import torch
from pytorch_wavelets import DWTForward, DWTInverse


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = DWTForward(J=2, wave="db2", mode="zero"), DWTInverse(wave="db2", mode="zero")
        self.low = torch.nn.Conv2d(3, 3, 3, padding=1)
        self.gains = torch.nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        low, high = self.down(x)
        return self.up(
            (self.low(low), [each * gain[None, None, :, None, None] for each, gain in zip(high, self.gains, strict=True)])
        )


recorder.seed()
x = torch.randn(32, 3, 16, 16)
recorder.fit(Denoiser(), lambda net, x: (net(x) - 0.5 * x).square().mean(), [x], batch_size=8)
