"""einops: layers that rearrange and reduce, and an einsum."""

import recorder
import torch
from einops import einsum, pack, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Sequential(Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4), torch.nn.Linear(48, 16))
        self.mix = EinMix("b n d -> b m d", weight_shape="n m", bias_shape="m", n=17, m=8)
        self.token, self.out = torch.nn.Parameter(torch.zeros(16)), torch.nn.Sequential(Reduce("b m d -> b d", "mean"))
        self.head = torch.nn.Parameter(torch.randn(16, 4) / 4)

    def forward(self, x):
        packed, _ = pack([self.token.expand(len(x), -1), self.patches(x)], "b * d")
        first, rest = unpack(self.mix(packed).relu(), [(4,), (4,)], "b * d")
        return einsum(self.out(torch.cat([first, rest], 1)), self.head, "b d, d k -> b k")


recorder.seed()
data = [torch.randn(32, 3, 16, 16), torch.randint(0, 4, (32,))]
recorder.fit(Mixer(), lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), data, batch_size=8)
