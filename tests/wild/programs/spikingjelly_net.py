"""spikingjelly: neurons that keep their state over the steps of a batch, and are reset after it."""

import recorder
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

recorder.seed()
net = nn.Sequential(
    layer.Linear(8, 16),
    neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan()),
    layer.Linear(16, 4),
    neuron.IFNode(surrogate_function=surrogate.Sigmoid()),
)


def loss(net, x, y):
    out = sum(net(x) for _ in range(4)) / 4
    functional.reset_net(net)
    return nn.functional.mse_loss(out, nn.functional.one_hot(y, 4).float())


recorder.fit(net, loss, [torch.rand(32, 8) * 2, torch.randint(0, 4, (32,))], batch_size=8)
