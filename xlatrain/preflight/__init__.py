"""Compile the programs of a run for a pod that is not here, and say what they will take there."""

from xlatrain.preflight.libtpu import LibtpuError
from xlatrain.preflight.program import CompiledStep, Step, Work, compile_step
from xlatrain.preflight.pure import preflight_engine, preflight_step
from xlatrain.preflight.topology import Topology, TopologyError

__all__ = [
    "CompiledStep",
    "LibtpuError",
    "Step",
    "Topology",
    "TopologyError",
    "Work",
    "compile_step",
    "preflight_engine",
    "preflight_step",
]
