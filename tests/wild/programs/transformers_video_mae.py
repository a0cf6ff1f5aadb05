"""transformers: VideoMAE, pretrained with the same number of masked patches in each row."""

import recorder
import torch
from transformers import VideoMAEConfig, VideoMAEForPreTraining

recorder.seed()
encoder = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
decoder = {f"decoder_{name}": size for name, size in encoder.items()} | {"decoder_num_hidden_layers": 1}
net = VideoMAEForPreTraining(VideoMAEConfig(image_size=32, patch_size=16, num_frames=4, tubelet_size=2, **encoder, **decoder))
n = 8
masks = torch.stack([torch.randperm(n) < n // 2 for _ in range(16)])
recorder.fit(
    net,
    lambda net, x, masked: net(x, bool_masked_pos=masked).loss,
    [torch.rand(16, 4, 3, 32, 32), masks],
    batch_size=8,
    data_parallel=False,
)
