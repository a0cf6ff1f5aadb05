"""tensordict: batches that are TensorDicts, and a module that reads and writes their keys."""

import lightning.pytorch as pl
import recorder
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.utils.data import DataLoader

recorder.seed()


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = TensorDictSequential(
            TensorDictModule(nn.Linear(8, 16), ["x"], ["hidden"]), TensorDictModule(nn.Linear(16, 4), ["hidden"], ["logits"])
        )

    def training_step(self, batch, _):
        out = self.net(batch)
        return nn.functional.cross_entropy(out["logits"], out["y"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


data = TensorDict({"x": torch.randn(64, 8), "y": torch.randint(0, 4, (64,))}, batch_size=[64])
recorder.trainer(max_epochs=2).fit(Module(), DataLoader(data, batch_size=8, collate_fn=lambda rows: torch.stack(rows)))
