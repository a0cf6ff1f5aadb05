"""gpytorch: an exact Gaussian process, one batch of all points."""

import gpytorch
import recorder
import torch

x = torch.linspace(0, 1, 32)
y = torch.sin(x * 6)


class Process(gpytorch.models.ExactGP):
    def __init__(self, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


recorder.seed()
model = Process(gpytorch.likelihoods.GaussianLikelihood())
marginal = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
recorder.fit(model, lambda net, x, y: -marginal(net(x), y), [x, y], batch_size=32, data_parallel=False)
