"""monai: segmentation by a Dice loss, validated by sliding windows and a Dice metric."""

import lightning.pytorch as pl
import recorder
import torch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import SegResNet
from torch.utils.data import DataLoader, TensorDataset

recorder.seed()


class Segmentation(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = SegResNet(spatial_dims=2, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,))
        self.loss, self.metric = DiceCELoss(to_onehot_y=True, softmax=True), DiceMetric(include_background=False)

    def training_step(self, batch, _):
        x, y = batch
        return self.loss(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        out = sliding_window_inference(x, (8, 8), 4, self.net, overlap=0.25)
        hard = torch.nn.functional.one_hot(out.argmax(1), 2).movedim(-1, 1)
        self.metric(hard, torch.nn.functional.one_hot(y[:, 0].long(), 2).movedim(-1, 1))

    def on_validation_epoch_end(self):
        self.log("dice", self.metric.aggregate())
        self.metric.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


x = torch.randn(16, 1, 16, 16)
loader = DataLoader(TensorDataset(x, (x > 0).float()), batch_size=4)
recorder.trainer(max_epochs=2).fit(Segmentation(), loader, loader)
