"""sentence-transformers: a small BERT with mean pooling, cosine loss on pairs."""

import recorder
import torch
from sentence_transformers.models import Pooling
from transformers import BertConfig, BertModel

config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0


class Sentences(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bert, self.pooling = BertModel(config), Pooling(32)

    def forward(self, ids):
        mask = torch.ones_like(ids)
        tokens = self.bert(ids, attention_mask=mask).last_hidden_state
        return self.pooling({"token_embeddings": tokens, "attention_mask": mask})["sentence_embedding"]


def loss(net, one, other, score):
    return torch.nn.functional.mse_loss(torch.cosine_similarity(net(one), net(other)), score)


recorder.seed()
pairs = [torch.randint(0, 100, (64, 9)), torch.randint(0, 100, (64, 9)), torch.rand(64)]
recorder.fit(Sentences(), loss, pairs, batch_size=16)
