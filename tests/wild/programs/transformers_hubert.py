"""transformers: HuBERT as a classifier of sounds, with its masked times."""

import recorder
import torch
from transformers import HubertConfig, HubertForSequenceClassification

recorder.seed()
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "classifier_proj_size": 16,
    "num_labels": 4,
}
convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
drops = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop", "activation_dropout"), 0.0
)
config = HubertConfig(
    **sizes,
    **convolutions,
    **drops,
    mask_time_prob=0.2,
    mask_time_length=2,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
)
recorder.fit(
    HubertForSequenceClassification(config),
    lambda net, sound, labels: net(sound, labels=labels).loss,
    [torch.randn(16, 800), torch.randint(0, 4, (16,))],
    batch_size=8,
    data_parallel=False,
)
