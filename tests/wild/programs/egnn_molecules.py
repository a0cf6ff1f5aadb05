"""egnn-pytorch: equivariant layers over points, all of them and the nearest."""

import recorder
import torch
from egnn_pytorch import EGNN_Network

feats, points = torch.randint(0, 6, (32, 8)), torch.randn(32, 8, 3)
for nearest in (0, 3):
    recorder.seed()
    model = EGNN_Network(num_tokens=6, dim=8, depth=2, num_nearest_neighbors=nearest, norm_coors=True)

    def loss(net, feats, points):
        out, moved = net(feats, points)
        return out.square().mean() + (moved - points.flip(1)).square().mean()

    recorder.fit(model, loss, [feats, points], batch_size=8)
