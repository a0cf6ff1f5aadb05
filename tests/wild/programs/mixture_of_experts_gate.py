"""mixture-of-experts: two experts for each token by a gate, with a loss that balances them."""

import recorder
import torch
from mixture_of_experts import MoE

recorder.seed()
model = MoE(dim=8, num_experts=4, hidden_dim=16, second_policy_train="all", second_policy_eval="all")


def loss(net, x):
    out, balance = net(x)
    return (out - x).square().mean() + balance


recorder.fit(model, loss, [torch.randn(32, 16, 8)], batch_size=8)
