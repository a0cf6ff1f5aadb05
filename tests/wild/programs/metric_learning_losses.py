"""pytorch-metric-learning: losses over all pairs, proxies, and a memory of earlier batches."""

import recorder
import torch
from pytorch_metric_learning import losses

x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
for make in (
    lambda: losses.NTXentLoss(),
    lambda: losses.ProxyAnchorLoss(4, 8),
    lambda: losses.ContrastiveLoss(),
    lambda: losses.SupConLoss(),
):
    recorder.seed()
    net = torch.nn.ModuleDict({"net": torch.nn.Linear(8, 8), "criterion": make()})
    recorder.fit(net, lambda net, x, y: net["criterion"](net["net"](x), y), [x, y], batch_size=16, data_parallel=False)
