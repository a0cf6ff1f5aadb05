"""neuraloperator: a Fourier neural operator."""

import recorder
import torch
from neuralop.models import FNO

recorder.seed()
model = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
x = torch.randn(32, 1, 16, 16)
recorder.fit(model, lambda net, x, y: torch.nn.functional.mse_loss(net(x), y), [x, x.roll(1, -1)], batch_size=8)
