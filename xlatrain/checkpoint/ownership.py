"""Ownership of a payload: its name says which process writes it, so that no process removes what another is writing.

The last 32 hexadecimal digits of a name are the writer's host, process and start, and eight random ones. Of a writer on this host
it is known whether it lives; what another host's left is judged by its age alone. Names of earlier releases are random: by age.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
import time
import uuid
from pathlib import Path

from etils import epath

LEASE_S = 3600.0
"""How long an unknown writer may be at work after its last write: as long as processes wait for each other."""

_MARK = re.compile(r"[-.]([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{8})\Z")


def mark() -> str:
    """32 hexadecimal digits for a name that nobody else has: this process's, and random ones."""
    return f"{_host()}{os.getpid():08x}{_started(os.getpid()) or 0:08x}{uuid.uuid4().hex[:8]}"


def is_abandoned(path: epath.Path, older_than_s: float = LEASE_S) -> bool:
    """Whether nobody can be at work on a payload, or temporary file, that is not committed.

    This process's own is abandoned: it saves one checkpoint at a time, and asks between two saves.
    """
    if (lives := writer_lives(path.name)) is not None:
        return not lives or is_own(path.name)
    try:
        return time.time() - _last_written(path) >= older_than_s
    except OSError:  # removed meanwhile, or storage that has no times
        return False


def is_marked(name: str) -> bool:
    """Whether a name says whose it is."""
    return _MARK.search(name) is not None


def is_own(name: str) -> bool:
    """Whether a name has this process's mark."""
    found = _MARK.search(name)
    return found is not None and found.group(1, 2, 3) == _MARK.search(f"-{mark()}").group(1, 2, 3)  # pyright: ignore[reportOptionalMemberAccess]


def writer_lives(name: str) -> bool | None:
    """Whether the process whose mark a name has is alive; None: on another host, or no mark."""
    found = _MARK.search(name)
    if found is None or found.group(1) != _host():
        return None
    started = _started(int(found.group(2), 16))
    return started is not None and started == int(found.group(3), 16)


@functools.cache
def _host() -> str:
    """This host, since it was started; a container that counts its processes by itself is a host of its own."""
    facts = [socket.gethostname(), str(uuid.getnode())]
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        try:
            facts.append(read())
        except OSError:
            continue
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def _started(process: int) -> int | None:
    """When a process of this host began, in the kernel's ticks (0 where there are none); None: there is no such process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if os.path.exists("/proc/self/stat") or not _exists(process) else 0
    return None if fields[0] in "ZX" else int(fields[19]) & 0xFFFFFFFF


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _last_written(path: epath.Path) -> float:
    if not path.is_dir():
        return path.stat().mtime
    return max(map(_last_written, path.iterdir()), default=time.time() if "://" in os.fspath(path) else path.stat().mtime)
