"""soft-moe-pytorch: slots that mix all tokens."""

import recorder
import torch
from soft_moe_pytorch import SoftMoE

recorder.seed()
model = SoftMoE(dim=8, seq_len=12, num_experts=4)
recorder.fit(model, lambda net, x: (net(x) - x).square().mean(), [torch.randn(32, 12, 8)], batch_size=8)
