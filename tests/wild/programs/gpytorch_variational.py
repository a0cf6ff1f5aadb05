"""gpytorch: a variational Gaussian process in batches."""

import gpytorch
import recorder
import torch


class Process(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


recorder.seed()
x = torch.linspace(0, 1, 64)[:, None]
model = Process(x[::8].clone())
likelihood = gpytorch.likelihoods.GaussianLikelihood()
elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=64)
net = torch.nn.ModuleList([model, likelihood])
recorder.fit(net, lambda net, x, y: -elbo(net[0](x), y), [x, torch.sin(6 * x[:, 0])], batch_size=16, data_parallel=False)
