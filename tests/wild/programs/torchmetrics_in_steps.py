"""torchmetrics: a collection in training and validation, and a loss from a functional metric."""

import lightning.pytorch as pl
import recorder
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.regression import pearson_corrcoef

recorder.seed()


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 4)
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.MulticlassAccuracy(4),
                "auroc": torchmetrics.classification.MulticlassAUROC(4, thresholds=10),
                "kappa": torchmetrics.classification.MulticlassCohenKappa(4),
            }
        )
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")

    def training_step(self, batch, _):
        x, y = batch
        out = self.net(x)
        self.log_dict(self.train_metrics(out.softmax(-1), y))
        return torch.nn.functional.cross_entropy(out, y) - 0.1 * pearson_corrcoef(out[:, 0], x[:, 0])

    def validation_step(self, batch, _):
        x, y = batch
        self.val_metrics.update(self.net(x).softmax(-1), y)

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), batch_size=16)
recorder.trainer(max_epochs=2).fit(Classifier(), loader, loader)
