"""segmentation-models-pytorch: a U-Net and a DeepLabV3+, Dice loss."""

import recorder
import segmentation_models_pytorch as smp
import torch

loss = smp.losses.DiceLoss("binary")
for kind, options in ((smp.Unet, {}), (smp.FPN, {"decoder_dropout": 0.0})):
    recorder.seed()
    model = kind("resnet18", encoder_weights=None, classes=1, **options)
    images, masks = torch.randn(16, 3, 64, 64), torch.randint(0, 2, (16, 1, 64, 64)).float()
    recorder.fit(model, lambda net, x, y: loss(net(x), y), [images, masks], batch_size=8)
