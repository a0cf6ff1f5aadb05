"""torcheval: metrics updated and computed in steps."""

import lightning.pytorch as pl
import recorder
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torcheval.metrics import MulticlassAccuracy, MulticlassAUROC
from torcheval.metrics.functional import multiclass_f1_score

recorder.seed()


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.accuracy, self.auroc = MulticlassAccuracy(), MulticlassAUROC(num_classes=4)

    def training_step(self, batch, _):
        x, y = batch
        out = self.net(x)
        self.accuracy.update(out, y)
        self.log("f1", multiclass_f1_score(out, y, num_classes=4, average="macro"))
        return nn.functional.cross_entropy(out, y)

    def on_train_epoch_end(self):
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()

    def validation_step(self, batch, _):
        self.auroc.update(self.net(batch[0]).softmax(1), batch[1])

    def on_validation_epoch_end(self):
        self.log("auroc", self.auroc.compute())
        self.auroc.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
recorder.trainer(max_epochs=2).fit(Classifier(), DataLoader(data, batch_size=16), DataLoader(data, batch_size=16))
