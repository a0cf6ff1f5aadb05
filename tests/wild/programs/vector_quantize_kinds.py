"""vector-quantize-pytorch: finite scalars, residual codes and lookup-free ones."""

import recorder
import torch
from vector_quantize_pytorch import FSQ, LFQ, ResidualVQ


class Coded(torch.nn.Module):
    def __init__(self, codes):
        super().__init__()
        self.encoder, self.codes, self.decoder = torch.nn.Linear(12, 4), codes, torch.nn.Linear(4, 12)

    def forward(self, x):
        coded, *others = self.codes(self.encoder(x))
        return self.decoder(coded), others[1].sum() if len(others) > 1 else 0.0


for make in (
    lambda: FSQ(levels=[5, 5, 4, 4]),
    lambda: ResidualVQ(dim=4, num_quantizers=2, codebook_size=16),
    lambda: LFQ(dim=4, codebook_size=16),
):
    recorder.seed()
    recorder.fit(
        Coded(make()), lambda net, x: (net(x)[0] - x).square().mean() + net(x)[1], [torch.randn(64, 6, 12)], batch_size=16,
        data_parallel=False,
    )  # fmt: skip
