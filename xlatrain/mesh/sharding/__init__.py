"""Sharding rules: how parameters, optimizer state and batches are split over a mesh."""

from xlatrain.mesh.sharding.picture import check_ending, save_table
from xlatrain.mesh.sharding.rules import Choice, PlannedSplit, ShardingRules, like_parameters, pairs_of, replicated
from xlatrain.mesh.sharding.sharding_table import ShardingTable, TensorPlace, idle_axes, slow_axes

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
]
