"""open_clip: a small CLIP and its loss."""

import open_clip
import recorder
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

recorder.seed()
model = CLIP(
    embed_dim=16,
    vision_cfg=CLIPVisionCfg(layers=2, width=32, head_width=16, patch_size=8, image_size=32),
    text_cfg=CLIPTextCfg(context_length=10, vocab_size=64, width=32, heads=2, layers=2),
)
criterion = open_clip.ClipLoss()
recorder.fit(
    model,
    lambda net, images, texts: criterion(*net(images, texts)),
    [torch.randn(16, 3, 32, 32), torch.randint(1, 64, (16, 10))],
    batch_size=8,
    data_parallel=False,
)
