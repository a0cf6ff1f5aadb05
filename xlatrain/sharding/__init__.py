"""How parameters, optimizer state and batches are split over a mesh."""

from xlatrain.sharding.placed import like_parameters, replicated, split_batch
from xlatrain.sharding.rules import Choice, PlannedSplit, ShardingRules
from xlatrain.sharding.saving import check_ending, save_table
from xlatrain.sharding.table import ShardingTable, TensorPlace

__all__ = [
    "Choice",
    "PlannedSplit",
    "ShardingRules",
    "ShardingTable",
    "TensorPlace",
    "check_ending",
    "like_parameters",
    "replicated",
    "save_table",
    "split_batch",
]
