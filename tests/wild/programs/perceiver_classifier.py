"""perceiver-pytorch: latents that attend to an image."""

import recorder
import torch
from perceiver_pytorch import Perceiver

recorder.seed()
model = Perceiver(
    input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=8, latent_dim=16, cross_dim_head=8,
    latent_heads=2, latent_dim_head=8, num_classes=4, self_per_cross_attn=1, weight_tie_layers=True,
)  # fmt: skip
data = [torch.randn(32, 8, 8, 3), torch.randint(0, 4, (32,))]
recorder.fit(model, lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), data, batch_size=8)
