"""timm: a small vision transformer."""

import recorder
import timm
import torch

recorder.seed()
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=4, depth=2)
images, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 4, (64,))
recorder.fit(model, lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), [images, labels], batch_size=16)
