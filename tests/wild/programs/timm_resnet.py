"""timm: a ResNet with batch norm and a MobileNet, by a LightningModule of ours."""

import recorder
import timm
import torch

for name in ("resnet10t", "mobilenetv3_small_050"):
    recorder.seed()
    model = timm.create_model(name, num_classes=4)
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 4, (64,))
    recorder.fit(model, lambda net, x, y: torch.nn.functional.cross_entropy(net(x), y), [images, labels], batch_size=16)
