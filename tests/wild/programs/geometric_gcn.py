"""PyG: a GCN and a GAT on one graph as the batch, and a GIN on batches of graphs of several sizes."""

import lightning.pytorch as pl
import recorder
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GIN, global_add_pool


class Graphs(pl.LightningModule):
    def __init__(self, net, pooled):
        super().__init__()
        self.net, self.pooled, self.head = net, pooled, torch.nn.Linear(16, 3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch.x, batch.edge_index)
        if self.pooled:
            out = global_add_pool(out, batch.batch)
        loss = torch.nn.functional.cross_entropy(self.head(out), batch.y)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def graph(nodes, labels):
    return Data(x=torch.randn(nodes, 8), edge_index=torch.randint(0, nodes, (2, 4 * nodes)), y=torch.randint(0, 3, (labels,)))


recorder.seed()
graphs = [graph(5 + k % 4, 1) for k in range(32)]
one = [graph(40, 40)] * 8
for module, data, size in ((Graphs(GAT(8, 16, 2), False), one, 1), (Graphs(GIN(8, 16, 2), True), graphs, 8)):
    recorder.seed()
    recorder.trainer(max_epochs=2).fit(module, DataLoader(data, batch_size=size))
