"""The command ``xlatrain preflight``: prints the report, and gives the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from torch_compat.preflight.script import preflight_script
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.preflight import LibtpuError, Topology, TopologyError


def run(topology: Topology, script: Sequence[str], *, as_json: bool, **options: Any) -> int:
    """Run preflight; the exit status is 0 if the run fits, 1 if not, 2 if that cannot be said."""
    try:
        report = preflight_script(script, topology, progress=_say, **options)
    except (MisconfigurationException, TopologyError, LibtpuError) as error:
        print(f"xlatrain preflight: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.to_dict(), indent=1) if as_json else report)
    return 0 if report.fits else 1


def _say(text: str) -> None:
    print(f"xlatrain preflight: {text}", file=sys.stderr, flush=True)
