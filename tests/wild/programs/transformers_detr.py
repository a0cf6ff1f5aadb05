"""transformers: DETR, whose loss matches boxes by SciPy's assignment."""

import lightning.pytorch as pl
import recorder
import torch
from torch.utils.data import DataLoader
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

recorder.seed()
backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
kinds = ("encoder", "decoder")
sizes = {f"{one}_{name}": size for one in kinds for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}
ours = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}
net = DetrForObjectDetection(DetrConfig(**ours, **sizes, d_model=32, num_queries=6, num_labels=3, dropout=0.0))


class Detector(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, _):
        out = self.net(pixel_values=batch["images"], labels=batch["labels"])
        self.log_dict(dict(out.loss_dict))
        return out.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def collate(rows):
    return {"images": torch.stack([image for image, _ in rows]), "labels": [target for _, target in rows]}


data = []
for _ in range(16):
    boxes = torch.cat([torch.rand(2, 2) * 0.5 + 0.25, torch.rand(2, 2) * 0.2 + 0.1], 1)
    data.append((torch.rand(3, 64, 64), {"class_labels": torch.randint(0, 3, (2,)), "boxes": boxes}))
recorder.trainer(max_epochs=2).fit(Detector(), DataLoader(data, batch_size=4, collate_fn=collate))
