"""kornia: a network that learns how to turn an image, by a warp."""

import kornia
import recorder
import torch


class Turning(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3))

    def forward(self, x):
        angle, shift = self.net(x).split((1, 2), 1)
        center = torch.full((len(x), 2), 2.5)
        turned = kornia.geometry.transform.rotate(x, 10 * angle[:, 0], center)
        return kornia.geometry.transform.translate(turned, shift)


recorder.seed()
x = torch.rand(32, 3, 6, 6)
recorder.fit(
    Turning(),
    lambda net, x, y: kornia.losses.charbonnier_loss(kornia.filters.gaussian_blur2d(net(x), (3, 3), (1.0, 1.0)), y, "mean"),
    [x, x.roll(1, 2)],
    batch_size=8,
)
