"""vector-quantize-pytorch: an autoencoder whose codebook is a moving average, with dead codes replaced."""

import recorder
import torch
from vector_quantize_pytorch import VectorQuantize

recorder.seed()


class Coded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(12, 8), torch.nn.Linear(8, 12)
        self.codes = VectorQuantize(dim=8, codebook_size=16, decay=0.8, commitment_weight=1.0, threshold_ema_dead_code=0)


def loss(net, x):
    coded, _, commitment = net.codes(net.encoder(x))
    return (net.decoder(coded) - x).square().mean() + commitment.sum()


recorder.fit(Coded(), loss, [torch.randn(64, 6, 12)], batch_size=16)
