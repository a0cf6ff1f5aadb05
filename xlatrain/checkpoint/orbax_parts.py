"""The parts of Orbax that arrays are written and read with, as this package sets them up; importing this imports Orbax."""

import xlatrain.checkpoint.absl_logging  # noqa: F401  isort: skip  (before Orbax, which logs while it is imported)
import orbax.checkpoint as ocp

from xlatrain.checkpoint.chunk_checksums import CHECKED
from xlatrain.checkpoint.readers import reader

__all__ = ["CHECKED", "ocp", "reader"]
