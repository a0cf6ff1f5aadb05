"""snntorch: a network of leaky neurons over a few time steps."""

import recorder
import snntorch
import torch

recorder.seed()


class Spiking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)
        self.one, self.two = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.8, learn_beta=True)

    def forward(self, x):
        one, two, spikes = self.one.init_leaky(), self.two.init_leaky(), []
        for _ in range(5):
            spike, one = self.one(self.first(x), one)
            spike, two = self.two(self.second(spike), two)
            spikes.append(two)
        return torch.stack(spikes).mean(0)


def loss(net, x, y):
    return torch.nn.functional.cross_entropy(net(x), y)


recorder.fit(Spiking(), loss, [torch.randn(64, 8), torch.randint(0, 3, (64,))], batch_size=16)
