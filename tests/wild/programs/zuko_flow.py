"""zuko: a neural spline flow, fitted by its log density."""

import recorder
import torch
import zuko

recorder.seed()
flow = zuko.flows.NSF(features=2, transforms=2, hidden_features=(16, 16))
recorder.fit(flow, lambda net, x: -net().log_prob(x).mean(), [torch.randn(64, 2)], batch_size=16)
