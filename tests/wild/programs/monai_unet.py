"""monai: a three-dimensional U-Net, Dice and cross-entropy."""

import recorder
import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

recorder.seed()
model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
loss = DiceCELoss(to_onehot_y=True, softmax=True)
images, masks = torch.randn(16, 1, 16, 16, 16), torch.randint(0, 2, (16, 1, 16, 16, 16))
recorder.fit(model, lambda net, x, y: loss(net(x), y), [images, masks], batch_size=8)
