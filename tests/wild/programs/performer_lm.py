"""performer-pytorch: linear attention by random features."""

import recorder
import torch
from performer_pytorch import PerformerLM

recorder.seed()
model = PerformerLM(num_tokens=32, dim=16, depth=1, max_seq_len=32, heads=2, dim_head=8, causal=False)
x = torch.randint(0, 32, (32, 32))


def loss(net, x):
    return torch.nn.functional.cross_entropy(net(x).transpose(1, 2), x)


recorder.fit(model, loss, [x], batch_size=8)
