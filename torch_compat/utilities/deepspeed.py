"""DeepSpeed's checkpoints and modules, which nothing here makes. API: ``lightning.pytorch.utilities.deepspeed``."""

from __future__ import annotations

import torch

from torch_compat.utilities.refused import refusing

CPU_DEVICE = torch.device("cpu")
_SUMMARY = "use ModelSummary, which counts sharded parameters whole"
_CONVERT = "DeepSpeed reads its checkpoints itself: run its zero_to_fp32.py, then load the file with weights_only=True"

__getattr__ = refusing(
    "lightning.pytorch.utilities.deepspeed",
    {
        "ds_checkpoint_dir": _CONVERT,
        "convert_zero_checkpoint_to_fp32_state_dict": _CONVERT,
        "_remove_prefix": _CONVERT,
        "DeepSpeedSummary": _SUMMARY,
        "DeepSpeedLayerSummary": _SUMMARY,
        "deepspeed_param_size": _SUMMARY,
    },
)
