"""``xlatrain completion``: a script that completes subcommands and their options in a shell."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

HELP = "print a script that completes this command in bash, zsh or fish"

_BASH = """\
_xlatrain() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=
  if [ "$COMP_CWORD" -eq 1 ]; then words={names}; else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  case $COMP_CWORD:$word in 1:* | *:-*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;; *) COMPREPLY=() ;; esac
}}
complete -o default -F _xlatrain xlatrain
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain completion SHELL``; returns 0."""
    args = _parser().parse_args(arguments)
    from xlatrain.cli import names

    subcommands = names()
    with ThreadPoolExecutor(2) as pool:  # each in a process of its own: some load torch to know their options
        options = dict(zip(subcommands, pool.map(_options, subcommands), strict=True))
    print(_fish(options) if args.shell == "fish" else _bash(options, zsh=args.shell == "zsh"), end="")
    return 0


def _options(name: str) -> list[str]:
    """The long options that the help of a subcommand names."""
    command = [sys.executable, "-m", "xlatrain.cli", name, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sorted(set(re.findall(r"--[a-z][A-Za-z0-9_.-]*[A-Za-z0-9]", shown)))


def _bash(options: dict[str, list[str]], *, zsh: bool) -> str:
    cases = "\n".join(f"      {name}) words={shlex.quote(' '.join(found))} ;;" for name, found in options.items() if found)
    script = _BASH.format(names=shlex.quote(" ".join(options)), cases=cases)
    return "autoload -Uz bashcompinit && bashcompinit\n" + script if zsh else script


def _fish(options: dict[str, list[str]]) -> str:
    lines = [f"complete -c xlatrain -n __fish_use_subcommand -a {shlex.quote(' '.join(options))}"]
    for name, found in options.items():
        lines += [f"complete -c xlatrain -n '__fish_seen_subcommand_from {name}' -l {option[2:]}" for option in found]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlatrain completion",
        description=f"{HELP}. Keep it in a file that your shell reads: xlatrain completion bash > ~/.xlatrain-completion, "
        "and `source ~/.xlatrain-completion` in ~/.bashrc. It takes some seconds: each subcommand is asked for its options.",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser
