"""torchdiffeq: a neural ODE with a fixed step, and its adjoint."""

import recorder
import torch
from torchdiffeq import odeint, odeint_adjoint


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def forward(self, t, y):
        return self.net(y)


times, x = torch.linspace(0, 1, 5), torch.randn(32, 2)
for solve in (odeint, odeint_adjoint):
    recorder.seed()

    def loss(net, x, solve=solve):
        return (solve(net, x, times, method="rk4") - x).square().mean()

    recorder.fit(Field(), loss, [x], batch_size=8)
