"""torchvision: a small ResNet, with MixUp called in the step."""

import lightning.pytorch as pl
import recorder
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18
from torchvision.transforms import v2

recorder.seed()


class Mixed(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = resnet18(num_classes=4)
        self.mix = v2.MixUp(num_classes=4, alpha=1e8)  # halves: draws of torch are not those of stock

    def training_step(self, batch, _):
        x, y = self.mix(*batch)
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


data = TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(0, 4, (16,)))
recorder.trainer(max_epochs=1).fit(Mixed(), DataLoader(data, 8))
