"""pythae: a variational autoencoder, and one whose posterior is a flow."""

import recorder
import torch
from pythae.models import VAE, WAE_MMD, VAEConfig, WAE_MMD_Config

recorder.seed()
wae = WAE_MMD(WAE_MMD_Config(input_dim=(1, 8, 8), latent_dim=4))
recorder.fit(wae.encoder, lambda net, x: net(x).embedding.pow(2).mean(), [torch.rand(32, 1, 8, 8)], batch_size=8)
vae = VAE(VAEConfig(input_dim=(1, 8, 8), latent_dim=4)).eval()


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.vae = vae

    def forward(self, x):
        found = self.vae.encoder(x)
        out = self.vae.decoder(found.embedding)["reconstruction"]
        return self.vae.loss_function(out, x, found.embedding, found.log_covariance, found.embedding)[0]


recorder.fit(Plain(), lambda net, x: net(x), [torch.rand(32, 1, 8, 8)], batch_size=8)
