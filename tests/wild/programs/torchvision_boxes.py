"""torchvision: losses of boxes, a focal loss, and rows of a feature pyramid."""

import recorder
import torch
from torchvision import ops


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.Conv2d(8, 8, 3, 2, 1)])
        self.pyramid = ops.FeaturePyramidNetwork([8, 8], 8)
        self.out = torch.nn.Linear(8, 5)

    def forward(self, x):
        maps = {}
        for name, conv in zip("ab", self.convs, strict=True):
            x = maps[name] = conv(x).relu()
        found = self.out(sum(one.mean((2, 3)) for one in self.pyramid(maps).values()))
        return found[:, :4].sigmoid(), found[:, 4]


def loss(net, x, boxes, is_there):
    found, there = net(x)
    found = ops.box_convert(found, "cxcywh", "xyxy")
    return (
        ops.generalized_box_iou_loss(found, boxes, reduction="mean")
        + ops.complete_box_iou_loss(found, boxes, reduction="mean")
        + ops.sigmoid_focal_loss(there, is_there, reduction="mean")
    )


recorder.seed()
corner = torch.rand(32, 2) * 0.5
data = [torch.randn(32, 3, 16, 16), torch.cat([corner, corner + 0.3], 1), torch.rand(32).round()]
recorder.fit(Head(), loss, data, batch_size=8)
