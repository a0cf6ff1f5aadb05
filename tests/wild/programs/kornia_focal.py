"""kornia: a network that looks at images' gradients, focal loss and SSIM."""

import kornia
import recorder
import torch


class Edges(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x):
        edges = kornia.filters.spatial_gradient(kornia.filters.gaussian_blur2d(x, (3, 3), (1.0, 1.0)))
        return self.conv(edges.flatten(1, 2))


def loss(net, x, y):
    out = net(x)
    return kornia.losses.focal_loss(out, y, alpha=0.5, reduction="mean") + kornia.losses.ssim_loss(out.sigmoid(), x, 5)


recorder.seed()
recorder.fit(Edges(), loss, [torch.rand(32, 3, 16, 16), torch.randint(0, 3, (32, 16, 16))], batch_size=8)
