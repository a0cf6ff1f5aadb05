"""pykan: a Kolmogorov-Arnold network of splines."""

import recorder
import torch
from kan import KAN

recorder.seed()
model = KAN(width=[4, 5, 1], grid=4, k=3, seed=1, auto_save=False, save_act=False)
recorder.fit(model, lambda net, x, y: (net(x) - y).pow(2).mean(), [torch.rand(32, 4) * 2 - 1, torch.randn(32, 1)], batch_size=8)
