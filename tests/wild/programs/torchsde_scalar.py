"""torchsde: a neural SDE along a Brownian motion that is given."""

import recorder
import torch
import torchsde


class Motion(torch.nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self):
        super().__init__()
        self.drift = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.size = torch.nn.Parameter(torch.full((2,), 0.1))

    def f(self, t, y):
        return self.drift(y)

    def g(self, t, y):
        return self.size.expand_as(y)


class Path:
    """Brownian increments of the batch."""

    def __init__(self, steps):
        self.steps, self.shape, self.dtype, self.device = steps, steps.shape[1:], steps.dtype, steps.device
        self.levy_area_approximation = "none"

    def __call__(self, ta, tb=None, return_U=False, return_A=False):
        return self.steps[round(float(ta) * 8)]


recorder.seed()
times = torch.linspace(0, 1, 3)


def loss(net, x, steps):
    out = torchsde.sdeint(net, x, times, bm=Path(steps.transpose(0, 1)), method="euler", dt=1 / 8)
    return (out[-1] - x).square().mean()


recorder.fit(Motion(), loss, [torch.randn(32, 2), torch.randn(32, 8, 2) / 8**0.5], batch_size=8)
