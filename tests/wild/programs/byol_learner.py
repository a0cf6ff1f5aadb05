"""byol-pytorch: a learner with hidden layers by hooks, and a target that is a moving average."""

import lightning.pytorch as pl
import recorder
import torch
from byol_pytorch import BYOL
from torch.utils.data import DataLoader, TensorDataset

recorder.seed()
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
plain = torch.nn.Identity()


class Learning(pl.LightningModule):
    def __init__(self):
        super().__init__()
        options = {"image_size": 12, "hidden_layer": -1, "projection_size": 8, "projection_hidden_size": 16}
        self.learner = BYOL(net, augment_fn=plain, augment_fn2=torch.nn.AvgPool2d(3, 1, 1), use_momentum=True, **options)

    def training_step(self, batch, _):
        return self.learner(batch[0])

    def on_before_zero_grad(self, _):
        self.learner.update_moving_average()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


recorder.trainer(max_epochs=2).fit(Learning(), DataLoader(TensorDataset(torch.rand(32, 3, 12, 12)), 16))
