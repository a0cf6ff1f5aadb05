"""transformers: CLIP's contrastive loss of images and texts."""

import recorder
import torch
from transformers import CLIPConfig, CLIPModel

recorder.seed()
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
text = {**size, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 63, "bos_token_id": 0, "pad_token_id": 1}
config = CLIPConfig(text_config=text, vision_config={**size, "image_size": 32, "patch_size": 8}, projection_dim=16)
ids = torch.cat([torch.randint(2, 60, (16, 9)), torch.full((16, 1), 63)], 1)
model = CLIPModel(config)
recorder.fit(
    model,
    lambda net, images, ids: net(pixel_values=images, input_ids=ids, return_loss=True).loss,
    [torch.randn(16, 3, 32, 32), ids],
    batch_size=8,
    data_parallel=False,
)
