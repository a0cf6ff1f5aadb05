"""denoising-diffusion-pytorch: the loss of a diffusion model, with times and noise of the batch."""

import recorder
import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet

recorder.seed()
model = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=8, timesteps=20)
data = [torch.rand(16, 3, 8, 8), torch.randint(0, 20, (16,)), torch.randn(16, 3, 8, 8)]
recorder.fit(model, lambda net, x, t, noise: net.p_losses(net.normalize(x), t, noise=noise), data, batch_size=8)
