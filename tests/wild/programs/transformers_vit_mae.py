"""transformers: a masked autoencoder of images, with its own noise."""

import recorder
import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

recorder.seed()
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
decoder = {
    "decoder_hidden_size": 32,
    "decoder_intermediate_size": 64,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
}
model = ViTMAEForPreTraining(ViTMAEConfig(**sizes, **decoder, image_size=32, patch_size=8))
recorder.fit(
    model,
    lambda net, images, noise: net(images, noise=noise).loss,
    [torch.randn(16, 3, 32, 32), torch.rand(16, 16)],
    batch_size=8,
)
