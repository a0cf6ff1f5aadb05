"""torchvision: a Swin transformer, whose windows are shifted by rolls."""

import recorder
import torch
from torchvision.models.swin_transformer import SwinTransformer

recorder.seed()
model = SwinTransformer(
    patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], stochastic_depth_prob=0.0, num_classes=4
)
data = [torch.randn(32, 3, 16, 16), torch.randint(0, 4, (32,))]
recorder.fit(model, lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), data, batch_size=8)
