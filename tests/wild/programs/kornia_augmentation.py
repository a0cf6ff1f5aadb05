"""kornia: augmentations of whole batches in ``on_after_batch_transfer``, as its own Lightning tutorial has them."""

import kornia.augmentation as K
import lightning.pytorch as pl
import recorder
import torch
from torch.utils.data import DataLoader, TensorDataset


class Augmented(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.augment = torch.nn.Sequential(
            K.RandomHorizontalFlip(p=0.5), K.RandomAffine(degrees=10.0, p=0.7), K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.5)
        )
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4))
        self.net(torch.zeros(1, 3, 16, 16))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (self.augment(x) if self.trainer.training else x), y

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = TensorDataset(torch.rand(32, 3, 16, 16), torch.randint(0, 4, (32,)))
recorder.seed()
recorder.trainer(max_epochs=2).fit(Augmented(), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
