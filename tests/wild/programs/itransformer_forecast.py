"""iTransformer: variates attend to each other; several horizons by one net."""

import recorder
import torch
from iTransformer import iTransformer

recorder.seed()
model = iTransformer(
    num_variates=5, lookback_len=16, dim=16, depth=2, heads=2, dim_head=8, pred_length=(2, 4), use_reversible_instance_norm=True
)
x = torch.randn(32, 16, 5).cumsum(1)


def loss(net, x, *targets):  # its own is of training alone
    return sum((made - target).square().mean() for made, target in zip(net(x).values(), targets, strict=True))


recorder.fit(model, loss, [x, x[:, -2:], x[:, -4:]], batch_size=8)
