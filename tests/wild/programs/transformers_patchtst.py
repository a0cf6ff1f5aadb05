"""transformers: a forecaster of patches, and a small vision transformer."""

import recorder
import torch
from transformers import PatchTSTConfig, PatchTSTForPrediction, ViTConfig, ViTForImageClassification

recorder.seed()
small = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 32, "hidden_size": 16}
vit = ViTForImageClassification(
    ViTConfig(image_size=16, patch_size=8, num_hidden_layers=2, num_attention_heads=2, num_labels=4, **small)
)
data = [torch.randn(32, 3, 16, 16), torch.randint(0, 4, (32,))]
recorder.fit(vit, lambda net, x, y: net(pixel_values=x, labels=y).loss, data, batch_size=8)
recorder.seed()
config = PatchTSTConfig(
    num_input_channels=2, context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=16, num_hidden_layers=2,
    num_attention_heads=2, ffn_dim=32, head_dropout=0.0, ff_dropout=0.0, attention_dropout=0.0, loss="mse",
)  # fmt: skip
data = [torch.randn(32, 16, 2), torch.randn(32, 4, 2)]
recorder.fit(PatchTSTForPrediction(config), lambda net, x, y: net(past_values=x, future_values=y).loss, data, batch_size=8)
