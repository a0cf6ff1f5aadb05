"""captum: a network that is also trained on its own integrated gradients."""

import recorder
import torch
from captum.attr import Saliency

recorder.seed()
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Softplus(), torch.nn.Linear(16, 3))


def loss(net, x, y):
    with torch.enable_grad():
        looked = Saliency(net).attribute(x.clone().requires_grad_(), target=y, abs=True)
    return torch.nn.functional.cross_entropy(net(x * (1 + looked.detach())), y)


recorder.fit(net, loss, [torch.randn(64, 8), torch.randint(0, 3, (64,))], batch_size=16)
