"""transformers: a small BERT classifier."""

import recorder
import torch
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
recorder.seed()
ids, labels = torch.randint(0, 100, (64, 12)), torch.randint(0, 2, (64,))
recorder.fit(BertForSequenceClassification(config), lambda net, x, y: net(x, labels=y).loss, [ids, labels], batch_size=16)
