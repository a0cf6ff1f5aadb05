"""nflows: a masked autoregressive flow."""

import recorder
import torch
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation

recorder.seed()
layers = [one for _ in range(2) for one in (ReversePermutation(2), MaskedAffineAutoregressiveTransform(2, 8))]
flow = Flow(CompositeTransform(layers), StandardNormal([2]))
recorder.fit(flow, lambda net, x: -net.log_prob(x).mean(), [torch.randn(64, 2)], batch_size=16)
