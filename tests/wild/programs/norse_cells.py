"""norse: leaky neurons and an integrator over time."""

import norse.torch as norse
import recorder
import torch
from torch import nn

recorder.seed()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = norse.SequentialState(nn.Linear(8, 16), norse.LIFCell(), nn.Linear(16, 4), norse.LICell())

    def forward(self, x):
        state, found = None, []
        for step in x.unbind(1):
            out, state = self.cells(step, state)
            found.append(out)
        return torch.stack(found).amax(0)


def loss(net, x, y):
    return nn.functional.cross_entropy(net(x), y)


recorder.fit(Net(), loss, [torch.rand(32, 6, 8) * 4, torch.randint(0, 4, (32,))], batch_size=8)
