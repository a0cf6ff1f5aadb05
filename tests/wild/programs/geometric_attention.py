"""torch-geometric: GAT, GIN and GraphSAGE on one graph with masks of its nodes."""

import lightning.pytorch as pl
import recorder
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GIN, GraphSAGE


class Nodes(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def step(self, data, mask):
        out = self.net(data.x, data.edge_index)
        return torch.nn.functional.cross_entropy(out[mask], data.y[mask]), (out.argmax(-1) == data.y)[mask].float().mean()

    def training_step(self, data, _):
        loss, accuracy = self.step(data, data.train_mask)
        self.log("accuracy", accuracy, batch_size=1)
        return loss

    def validation_step(self, data, _):
        loss, accuracy = self.step(data, ~data.train_mask)
        self.log_dict({"val_loss": loss, "val_accuracy": accuracy}, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2, weight_decay=5e-4)


graph = Data(
    x=torch.randn(40, 8), y=torch.randint(0, 3, (40,)), edge_index=torch.randint(0, 40, (2, 160)), train_mask=torch.rand(40) < 0.6
)
for make in (lambda: GAT(8, 16, 2, 3, heads=2), lambda: GIN(8, 16, 2, 3), lambda: GraphSAGE(8, 16, 2, 3)):
    recorder.seed()
    recorder.trainer(max_epochs=5).fit(Nodes(make()), DataLoader([graph]), DataLoader([graph]))
