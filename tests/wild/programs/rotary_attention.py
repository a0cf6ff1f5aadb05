"""rotary-embedding-torch: rotated queries and keys, with frequencies that it caches."""

import recorder
import torch
from rotary_embedding_torch import RotaryEmbedding


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = torch.nn.Embedding(16, 16), torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.rotary = RotaryEmbedding(dim=4)

    def forward(self, x):
        q, k, v = self.qkv(self.embed(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


recorder.seed()
x = torch.randint(0, 16, (32, 17))
recorder.fit(
    Attention(),
    lambda net, x: torch.nn.functional.cross_entropy(net(x[:, :-1]).transpose(1, 2), x[:, 1:]),
    [x],
    batch_size=8,
)
