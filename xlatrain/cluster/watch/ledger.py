"""The ledger of a job: JSON lines that say where the time of its runs went, those that were killed included.

One line for each of: ``begin`` (a run: which ``fit`` of its script, the step that it continues from), ``progress`` (every few
seconds: its step, the seconds of each kind since it began), ``end`` (how it ended, with the same). ``time`` is in seconds since
1970.
A run that is killed has no ``end``; its last ``progress`` counts. A file may be appended to by any number of starts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xlatrain.cluster.watch.account import KINDS
from xlatrain.cluster.watch.progress import progress

VARIABLE = "XLATRAIN_LEDGER"


class LedgerError(ValueError):
    """The file is no ledger."""


class Ledger:
    """Appends to a file, on process 0; lines are written whole.

    Args:
        path: local; its folder is made.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            raise type(error)(f"{VARIABLE}={os.fspath(path)!r}: cannot be written ({error}); expected a file") from error

    def write(self, event: str, **facts: Any) -> None:
        """Append one event, with the time and the step unless ``facts`` has others."""
        line = {"event": event, "time": round(time.time(), 3), "pid": os.getpid(), "step": progress.step, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[Mapping[str, Any]]:
        """The lines written so far, by earlier starts too."""
        return read(self.path)


def read(path: str | os.PathLike[str]) -> list[Mapping[str, Any]]:
    """The events of a ledger; a last line that was cut off by a kill is left out.

    Raises:
        FileNotFoundError: there is none.
        LedgerError: a line is no event.
    """
    return list(_events(Path(path)))


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            known = event["event"] in ("begin", "progress", "end") and isinstance(event["time"], int | float)
            known = known and set(event.get("seconds", {})) <= set(KINDS)
        except (ValueError, TypeError, KeyError):
            known = False
        if known:
            yield event
        elif number < len(lines):
            raise LedgerError(
                f"{path}, line {number}: expected a JSON object with event begin, progress or end, not {line[:80]!r}"
            )
