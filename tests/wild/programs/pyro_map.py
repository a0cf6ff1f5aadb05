"""pyro: the maximum a posteriori of a regression, by the ELBO of a delta guide."""

import pyro
import pyro.distributions as dist
import recorder
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta

recorder.seed()


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w + b, scale), obs=y)


x = torch.randn(64, 4)
y = x.sum(1) + 0.1 * torch.randn(64)
guide = AutoDelta(model)
guide(x[:16], y[:16])
elbo = Trace_ELBO()
recorder.fit(guide, lambda net, x, y: elbo.differentiable_loss(model, net, x, y), [x, y], batch_size=16)
