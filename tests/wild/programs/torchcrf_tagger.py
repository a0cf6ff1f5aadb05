"""pytorch-crf: a tagger with masked sequences, decoded in validation."""

import recorder
import torch
from torchcrf import CRF

recorder.seed()


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores, self.crf = torch.nn.Linear(8, 4), CRF(4, batch_first=True)


def loss(net, x, y, lengths):
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return -net.crf(net.scores(x), y, mask=mask, reduction="mean")


data = [torch.randn(32, 6, 8), torch.randint(0, 4, (32, 6)), torch.randint(2, 7, (32,))]
recorder.fit(Tagger(), loss, data, batch_size=8)
