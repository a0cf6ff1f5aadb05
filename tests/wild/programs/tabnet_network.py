"""pytorch-tabnet: its network, with its sparse loss."""

import recorder
import torch
from pytorch_tabnet.tab_network import TabNet

recorder.seed()
net = TabNet(8, 3, n_d=4, n_a=4, n_steps=2, virtual_batch_size=8, group_attention_matrix=torch.eye(8))


def loss(net, x, y):
    out, sparse = net(x)
    return torch.nn.functional.cross_entropy(out, y) - 1e-3 * sparse


recorder.fit(net, loss, [torch.randn(64, 8), torch.randint(0, 3, (64,))], batch_size=16, data_parallel=False)
