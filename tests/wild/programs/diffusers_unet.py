"""diffusers: a small UNet that learns to remove noise; the noise is part of the data, so that both runs see the same."""

import recorder
import torch
from diffusers import DDPMScheduler, UNet2DModel

recorder.seed()
model = UNet2DModel(
    sample_size=16,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
scheduler = DDPMScheduler(num_train_timesteps=100)


def loss(net, images, noise, times):
    noisy = scheduler.add_noise(images, noise, times)
    return torch.nn.functional.mse_loss(net(noisy, times).sample, noise)


images, noise = torch.randn(32, 1, 16, 16), torch.randn(32, 1, 16, 16)
recorder.fit(model, loss, [images, noise, torch.randint(0, 100, (32,))], batch_size=8)
