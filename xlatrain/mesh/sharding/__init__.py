"""Sharding rules: how parameters, optimizer state and batches are split over a mesh."""

from xlatrain.mesh.sharding.placed import like_parameters, replicated, split_batch
from xlatrain.mesh.sharding.rules import Choice, PlannedSplit, ShardingRules, pairs_of
from xlatrain.mesh.sharding.saving import check_ending, save_table
from xlatrain.mesh.sharding.table import ShardingTable, TensorPlace, idle_axes, slow_axes

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
