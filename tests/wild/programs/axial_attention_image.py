"""axial-attention: attention along rows and columns of an image, with positions, in reversible layers."""

import recorder
import torch
from axial_attention import AxialImageTransformer

recorder.seed()
model = AxialImageTransformer(dim=8, depth=2, heads=2, reversible=True, axial_pos_emb_shape=(6, 6))
recorder.fit(model, lambda net, x: (net(x) - x).square().mean(), [torch.randn(32, 8, 6, 6)], batch_size=8)
