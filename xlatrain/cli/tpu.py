"""``xlatrain tpu``: the scripts that create TPU VMs, set them up and run on them."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from xlatrain.cli.shipped import folder

HELP = "create a TPU, set it up, launch on all of its workers: create, setup, launch, supervise, …"

_NO_COMMAND = ("common",)  # sourced by the others


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain tpu NAME …``, a script of ``tpu_scripts``; returns its exit status."""
    try:
        scripts = {path.stem: path for path in sorted(folder("tpu_scripts").glob("*.sh")) if path.stem not in _NO_COMMAND}
    except FileNotFoundError as error:
        print(f"xlatrain tpu: {error}", file=sys.stderr)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(scripts))
        return 0 if arguments else 2
    name = arguments[0].removesuffix(".sh")
    if name not in scripts:
        close = difflib.get_close_matches(name, scripts, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        print(f"xlatrain tpu: there is no {name!r}{hint} Choose from {', '.join(scripts)}.", file=sys.stderr)
        return 2
    # By bash: a wheel's files may have lost their permission to be run. The manifests of gke and slurm are made by this Python.
    own = ["--python", sys.executable] if name in ("gke", "slurm") and not _given("--python", arguments) else []
    return subprocess.run(["bash", str(scripts[name]), *own, *arguments[1:]], check=False).returncode


def _given(option: str, arguments: Sequence[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(each == option or each.startswith(f"{option}=") for each in own)


def _usage(scripts: dict[str, Path]) -> str:
    lines = ["usage: xlatrain tpu NAME [options] [-- what to run]", ""]
    lines += [f"  {name:<10} {_summary(path)}" for name, path in scripts.items()]
    return "\n".join(
        [*lines, "", "`xlatrain tpu NAME --help` shows the options, and --dry-run the commands that a script would run."]
    )


def _summary(path: Path) -> str:
    """The first sentence of the comment at the top of a script."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if line in ("#", ""):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment).split(". ")[0].rstrip(".")
