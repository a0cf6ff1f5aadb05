"""entmax: sparse attention and a sparse loss."""

import recorder
import torch
from entmax import Entmax15Loss, entmax15, sparsemax


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)

    def forward(self, x):
        scores = self.query(x) @ x.mT
        return self.out((entmax15(scores, dim=-1) + sparsemax(scores, dim=-1)) @ x).mean(1)


recorder.seed()
data = [torch.randn(32, 6, 8), torch.randint(0, 5, (32,))]
recorder.fit(Net(), lambda net, x, y: Entmax15Loss(reduction="elementwise_mean")(net(x), y), data, batch_size=8)
