"""The command ``xlatrain preflight``: prints the report, and gives the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_compat.preflight.script import preflight_script
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.preflight import LibtpuError, Topology, TopologyError


def run(topology: Topology, script: Sequence[str], *, as_json: bool, **options: Any) -> int:
    """Run preflight; the exit status is 0 if the run fits, 1 if not, 2 if that cannot be said."""
    try:
        with _voice() as say:
            report = preflight_script(script, topology, progress=say, **options)
    except (MisconfigurationException, TopologyError, LibtpuError) as error:
        print(f"xlatrain preflight: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=1) if as_json else report)
    return 0 if report.fits else 1


@contextlib.contextmanager
def _voice() -> Iterator[Callable[[str], None]]:
    """Prints to the stderr of now, also while the compiler's messages are taken from file descriptor 2."""
    try:
        own = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):  # no stderr, or none that has a descriptor (a notebook's)
        yield lambda text: print(f"xlatrain preflight: {text}", file=sys.stderr, flush=True)
        return
    with open(own, "w", encoding=sys.stderr.encoding, errors="replace") as stream:
        yield lambda text: print(f"xlatrain preflight: {text}", file=stream, flush=True)
