"""timm: mixup or CutMix of its training script, drawn for each batch, and its loss of soft labels."""

import recorder
import timm.data
import timm.loss
import torch

mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=4)
soft = timm.loss.SoftTargetCrossEntropy()


def loss(net, x, y):
    if not net.training:
        return torch.nn.functional.cross_entropy(net(x), y)
    x, y = mixup(x, y)
    return soft(net(x), y)


recorder.seed()
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 4))
recorder.fit(model, loss, [torch.randn(96, 3, 8, 8), torch.randint(0, 4, (96,))], batch_size=8, data_parallel=False)
