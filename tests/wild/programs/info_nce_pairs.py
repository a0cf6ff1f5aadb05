"""info-nce-pytorch: contrastive pairs, with negatives of the batch and with given ones."""

import recorder
import torch
from info_nce import InfoNCE

x, near, far = torch.randn(64, 8), torch.randn(64, 8), torch.randn(64, 6, 8)
for mode in ("unpaired", "paired"):
    recorder.seed()
    criterion = InfoNCE(negative_mode=mode)

    def loss(net, x, near, far, criterion=criterion, mode=mode):
        negatives = net(far) if mode == "paired" else net(far[:, 0])
        return criterion(net(x), net(near), negatives) + criterion(net(x), net(near))

    recorder.fit(torch.nn.Linear(8, 8), loss, [x, near, far], batch_size=16, data_parallel=False)
