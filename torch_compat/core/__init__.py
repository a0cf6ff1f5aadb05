"""LightningModule and LightningDataModule (``lightning.pytorch.core``)."""

from __future__ import annotations

import torch.distributed
import torch.nn.attention.flex_attention
import torch.nn.utils.prune
import torch.utils.flop_counter  # as in stock, importing this makes these attributes of torch, which scripts use

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule

if torch.distributed.is_available():
    import torch.distributed.fsdp
    import torch.distributed.nn
    import torch.distributed.tensor.parallel

__all__ = ["LightningDataModule", "LightningModule"]
