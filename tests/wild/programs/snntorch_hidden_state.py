"""snntorch: neurons that keep their own state, which the step resets."""

import recorder
import snntorch
import torch
from snntorch import utils

recorder.seed()
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    snntorch.Leaky(beta=0.9, init_hidden=True),
    torch.nn.Linear(16, 3),
    snntorch.Leaky(beta=0.8, init_hidden=True, output=True),
)


def loss(net, x, y):
    utils.reset(net)
    out = sum(net(x)[1] for _ in range(4))
    return torch.nn.functional.cross_entropy(out, y)


recorder.fit(net, loss, [torch.randn(64, 8), torch.randint(0, 3, (64,))], batch_size=16)
