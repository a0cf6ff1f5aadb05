"""Types of the Trainer's arguments: what a command line may choose from (``LightningCLI`` reads them)."""

from __future__ import annotations

from typing import Literal, Union

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.layer_sync import LayerSync
from torch_compat.plugins.precision import Precision

PrecisionInput = Literal[
    64, 32, 16, "transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed",
    "32-true", "64-true", "64", "32", "16", "bf16", "int8-mixed", "float8-mixed",
]  # fmt: skip
PluginInput = Union[Precision, ClusterEnvironment, CheckpointIO, LayerSync]  # noqa: UP007  shown in the parser's help
