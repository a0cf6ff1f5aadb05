"""torchvision: crops, flips, jitter and rotations in the step, which torch's generator decides."""

import recorder
import torch
from torchvision import transforms

kinds = {
    "crop": transforms.RandomCrop(12, padding=2),
    "flip": transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()]),
    "brightness": transforms.ColorJitter(brightness=0.4),
    "rotation": transforms.RandomRotation(15),
    "affine": transforms.RandomAffine(10, translate=(0.1, 0.1), scale=(0.9, 1.1)),
}
images, labels = torch.rand(64, 3, 16, 16), torch.randint(0, 4, (64,))
for kind in kinds.values():
    recorder.seed()
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    net.append(torch.nn.Linear(8, 4))

    def loss(net, x, y, kind=kind):
        return torch.nn.functional.cross_entropy(net(kind(x) if net.training else x), y)

    recorder.fit(net, loss, [images, labels], batch_size=8, data_parallel=False)
