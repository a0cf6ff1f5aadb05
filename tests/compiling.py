"""How XLA:CPU compiles the programs of tests: quickly, or as it compiles those of users.

Without fusion emitters and LLVM's optimizations, and with its code in one piece, a program takes a seventh of the time to
compile. (XLA cuts it into 32, one for each of LLVM's threads: two fifths of what small programs take otherwise.) What computes
it is the same otherwise: passes over HLO, partitioning, libraries, collectives. So are compiled the programs of this process
and of those it starts. As for users are compiled the parity scripts about numbers on one device, the demo, each op by itself
(`tools/op_check.py`, and but for LLVM `tests/xlatrain/bridge/_compare.py`), and whatever tests look at compiled programs
themselves, with the fixture ``compiled_as_for_users``. ``XLA_FLAGS= make test`` compiles everything so.
"""

from __future__ import annotations

import os

QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""``XLA_FLAGS`` of a test process, unless it was given some."""

AS_FOR_USERS = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}
"""Options of XLA:CPU of a process without ``XLA_FLAGS``."""


def environment(*, quickly: bool = True) -> dict[str, str]:
    """This process's environment for one that has as many devices as it asks for, and whose programs are compiled so."""
    own = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return own | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", QUICKLY)} if quickly else own
