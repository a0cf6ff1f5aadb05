"""transformers: wav2vec 2.0 with CTC, sounds of several lengths and masked times."""

import recorder
import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

recorder.seed()
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (5, 4), "num_feat_extract_layers": 2}
names = ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop", "activation_dropout")
drops = dict.fromkeys(names, 0.0)
masks = {"mask_time_prob": 0.3, "mask_time_length": 2, "mask_feature_prob": 0.0}
config = Wav2Vec2Config(
    **sizes, **convolutions, **drops, **masks, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, ctc_zero_infinity=True
)
sound = torch.randn(16, 800)
lengths = torch.randint(500, 801, (16, 1))
there = (torch.arange(800) < lengths).long()
recorder.fit(
    Wav2Vec2ForCTC(config),
    lambda net, sound, there, labels: net(sound, attention_mask=there, labels=labels).loss,
    [sound * there, there, torch.randint(1, 16, (16, 5))],
    batch_size=8,
    data_parallel=False,
)
