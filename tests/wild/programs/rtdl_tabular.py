"""rtdl: an FT-Transformer, and periodic and piecewise linear embeddings of numbers."""

import recorder
import torch
from rtdl_num_embeddings import PeriodicEmbeddings, PiecewiseLinearEmbeddings, compute_bins
from rtdl_revisiting_models import FTTransformer

numbers, classes, y = torch.randn(64, 4), torch.randint(0, 3, (64, 2)), torch.randn(64, 1)
recorder.seed()
model = FTTransformer(
    n_cont_features=4, cat_cardinalities=[3, 3], d_out=1, n_blocks=2, d_block=8, attention_n_heads=2, attention_dropout=0.0,
    ffn_d_hidden_multiplier=2, ffn_dropout=0.0, residual_dropout=0.0,
)  # fmt: skip
recorder.fit(model, lambda net, x, c, y: (net(x, c) - y).square().mean(), [numbers, classes, y], batch_size=16)
for embed in (
    lambda: PeriodicEmbeddings(4, 8, n_frequencies=6, frequency_init_scale=0.1, lite=False),
    lambda: PiecewiseLinearEmbeddings(compute_bins(numbers, n_bins=6), 8, activation=False, version="B"),
):
    recorder.seed()
    net = torch.nn.Sequential(embed(), torch.nn.Flatten(), torch.nn.Linear(32, 1))
    recorder.fit(net, lambda net, x, y: (net(x) - y).square().mean(), [numbers, y], batch_size=16)
