"""vit-pytorch: a vision transformer, and one distilled from a frozen teacher."""

import recorder
import torch
from vit_pytorch import SimpleViT
from vit_pytorch.distill import DistillableViT, DistillWrapper

sizes = {"image_size": 16, "patch_size": 8, "num_classes": 4, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
x, y = torch.randn(64, 3, 16, 16), torch.randint(0, 4, (64,))
recorder.seed()
recorder.fit(SimpleViT(**sizes), lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), [x, y], batch_size=16)
recorder.seed()
teacher = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4)).requires_grad_(False)
distiller = DistillWrapper(student=DistillableViT(**sizes), teacher=teacher, temperature=3, alpha=0.5)
recorder.fit(distiller, lambda net, x, y: net(x, y), [x, y], batch_size=16)
