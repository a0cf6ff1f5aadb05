"""pytorch-metric-learning: a triplet loss with a miner, and ArcFace's."""

import recorder
import torch
from pytorch_metric_learning import losses, miners

x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
mine, triplet = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()
for criterion in (lambda out, y: triplet(out, y, mine(out, y)), losses.ArcFaceLoss(4, 8)):
    recorder.seed()
    model = torch.nn.Linear(8, 8)
    recorder.fit(model, lambda net, x, y, criterion=criterion: criterion(net(x), y), [x, y], batch_size=16)
