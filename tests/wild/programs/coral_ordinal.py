"""coral-pytorch: ordinal regression by CORAL and by CORN, whose loss selects rows for each rank."""

import recorder
import torch
from coral_pytorch.dataset import levels_from_labelbatch
from coral_pytorch.layers import CoralLayer
from coral_pytorch.losses import coral_loss, corn_loss

x, y = torch.randn(64, 8), torch.randint(0, 5, (64,))
recorder.seed()
recorder.fit(
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), CoralLayer(16, 5)),
    lambda net, x, y: coral_loss(net(x), levels_from_labelbatch(y, num_classes=5).to(x.dtype)),
    [x, y],
    batch_size=16,
)
recorder.seed()
recorder.fit(torch.nn.Linear(8, 4), lambda net, x, y: corn_loss(net(x), y, 5), [x, y], batch_size=16)
