"""Sharding rules: how parameters, optimizer state and batches are split over a mesh."""

from xlatrain.sharding.placed import like_parameters, replicated, split_batch
from xlatrain.sharding.rules import Choice, PlannedSplit, ShardingRules, pairs_of
from xlatrain.sharding.saving import check_ending, save_table
from xlatrain.sharding.table import ShardingTable, TensorPlace, idle_axes, slow_axes

__all__ = [
    "Choice",
    "PlannedSplit",
    "ShardingRules",
    "ShardingTable",
    "TensorPlace",
    "check_ending",
    "idle_axes",
    "like_parameters",
    "pairs_of",
    "replicated",
    "save_table",
    "slow_axes",
    "split_batch",
]
