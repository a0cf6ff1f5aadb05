"""transformers: SegFormer, with labels that are left out."""

import recorder
import torch
from transformers import SegformerConfig, SegformerForSemanticSegmentation

recorder.seed()
sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32}
drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
model = SegformerForSemanticSegmentation(SegformerConfig(**sizes, **drops, num_labels=5))
labels = torch.randint(0, 5, (16, 64, 64))
labels[:, :8] = 255
recorder.fit(
    model,
    lambda net, x, y: net(pixel_values=x, labels=y).loss,
    [torch.randn(16, 3, 64, 64), labels],
    batch_size=8,
    data_parallel=False,
)
