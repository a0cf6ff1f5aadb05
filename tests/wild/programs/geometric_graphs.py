"""torch-geometric: graphs of several sizes in batches, by GIN and by attention, pooled."""

import lightning.pytorch as pl
import recorder
import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GINConv, global_add_pool, global_mean_pool

recorder.seed()
graphs = []
for n in [4, 5, 6, 7] * 8:
    ring = torch.arange(n)
    edges = torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([ring.roll(1), ring])], 1)
    graphs.append(Data(x=torch.randn(n, 4), edge_index=edges, y=torch.tensor([float(n)])))


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.gin = GINConv(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)))
        self.gat, self.out = GATConv(8, 4, heads=2), torch.nn.Linear(16, 1)

    def training_step(self, batch, _):
        x = self.gin(batch.x, batch.edge_index).relu()
        x = self.gat(x, batch.edge_index).relu()
        both = torch.cat([global_add_pool(x, batch.batch), global_mean_pool(x, batch.batch)], 1)
        loss = torch.nn.functional.mse_loss(self.out(both)[:, 0], batch.y)
        self.log("loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


recorder.trainer(max_epochs=2).fit(Net(), DataLoader(graphs, batch_size=8))
