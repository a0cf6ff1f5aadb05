"""vector-quantize-pytorch: codes that nobody uses are replaced by rows of the batch."""

import recorder
import torch
from torch import nn
from vector_quantize_pytorch import VectorQuantize

recorder.seed()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = VectorQuantize(dim=4, codebook_size=32, threshold_ema_dead_code=2, decay=0.8)


def loss(net, x):
    quantized, _, commit = net.codes(net.down(x))
    return (net.up(quantized) - x).pow(2).mean() + commit.sum()


recorder.fit(Net(), loss, [torch.randn(64, 6, 8)], batch_size=8, data_parallel=False)
