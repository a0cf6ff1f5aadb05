"""normflows: RealNVP, trained by the forward divergence."""

import normflows as nf
import recorder
import torch

recorder.seed()
layers = []
for _ in range(3):
    layers += [nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 16, 2], init_zeros=True)), nf.flows.Permute(2, mode="swap")]
model = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), layers)
recorder.fit(model, lambda net, x: net.forward_kld(x), [torch.randn(64, 2)], batch_size=16)
