"""All rules, registered by what imports them."""

import xlatrain.bridge.lower.bounded.indexing
import xlatrain.bridge.lower.bounded.moving
import xlatrain.bridge.lower.bounded.reducing  # noqa: F401
from xlatrain.bridge.lower.bounded.rules import compute

__all__ = ["compute"]
