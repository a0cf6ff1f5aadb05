"""``xlatrain goodput``: where the time of a job went, from its ledger."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

HELP = "say where the time of a job went, restarts included, from its ledger (XLATRAIN_LEDGER)"


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain goodput …``; 0, or 1 where there is nothing to tell."""
    parser = argparse.ArgumentParser(prog="xlatrain goodput", description=HELP)
    parser.add_argument("ledger", help="the file that XLATRAIN_LEDGER named when the job ran")
    parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args(arguments)
    from xlatrain.cluster.watch.goodput import goodput
    from xlatrain.cluster.watch.ledger import LedgerError, read

    try:
        found = goodput(read(args.ledger))
    except (OSError, LedgerError) as error:
        print(f"xlatrain goodput: {error}", file=sys.stderr)
        return 1
    if found is None:
        print(f"xlatrain goodput: no run has begun in {args.ledger}", file=sys.stderr)
        return 1
    print(json.dumps(found.as_dict()) if args.json else "\n".join([str(found), *[f"  lost {loss}" for loss in found.losses]]))
    return 0
