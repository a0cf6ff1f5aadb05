"""Profilers: how long the parts of a run take."""

from __future__ import annotations

from torch_compat.profilers.advanced import AdvancedProfiler
from torch_compat.profilers.base import PassThroughProfiler
from torch_compat.profilers.profiler import Profiler
from torch_compat.profilers.pytorch import PyTorchProfiler
from torch_compat.profilers.simple import SimpleProfiler
from torch_compat.profilers.xla import XLAProfiler

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler", "XLAProfiler"]
