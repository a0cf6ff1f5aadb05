"""tab-transformer-pytorch: columns of classes and of numbers, by the Tab and the FT transformer."""

import recorder
import torch
from tab_transformer_pytorch import FTTransformer, TabTransformer

data = [torch.randint(0, 5, (64, 3)), torch.randn(64, 4), torch.rand(64, 1).round()]
for kind, more in ((TabTransformer, {"mlp_act": torch.nn.ReLU()}), (FTTransformer, {})):
    recorder.seed()
    model = kind(categories=(5, 5, 5), num_continuous=4, dim=8, dim_out=1, depth=2, heads=2, dim_head=4, **more)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    recorder.fit(
        model,
        lambda net, c, x, y: torch.nn.functional.binary_cross_entropy_with_logits(net(c, x), y),
        data,
        batch_size=16,
    )
