"""``python -m torch_compat script.py args…``: runs a script as ``python script.py args…`` does, with Lightning's names aliased.

``python -m torch_compat -m module args…`` runs a module as ``python -m module args…`` does, and
``python -m torch_compat - args…`` what comes from standard input.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable
from typing import Any, NoReturn

# Found now: the current folder, which may be where it is imported from, leaves sys.path when a script runs.
import xlatrain  # noqa: F401
from torch_compat.install import install
from torch_compat.stock_names.aliases import target_name

USAGE = "usage: python -m torch_compat [-m module | script.py | -] [args…]"
_OUR_FRAMES = (
    __file__,
    *(os.path.join(os.path.dirname(__file__), "fabric", name) for name in ("__main__.py", "cli.py")),
    runpy.__file__,
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


def main(argv: list[str]) -> None:
    """Runs the script or module named in ``argv``, which becomes its ``sys.argv``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    install()
    if argv[0] == "-m":
        if len(argv) < 2:
            sys.exit(f"{USAGE}\nArgument expected for the -m option")
        run = functools.partial(run_module, argv[1], argv[2:])
    elif argv[0] == "-":
        run = functools.partial(run_standard_input, argv[1:])
    elif argv[0].startswith("-"):
        sys.exit(f"{USAGE}\nunknown option {argv[0]}: options of Python itself go before -m torch_compat")
    else:
        run = functools.partial(run_script, argv[0], argv[1:])
    try:
        run()
    except SystemExit as end:
        # Where the script joined other processes: a failure must not wait for them at JAX's shutdown barrier.
        exits = sys.modules.get("xlatrain.cluster.distributed.exits")
        if exits is not None:
            exits.ends_with(end)
        raise
    except BaseException:
        # Python itself ends the process, with its own exit code (SIGINT's after Ctrl-C); only the report is shortened.
        sys.excepthook = functools.partial(_report, sys.excepthook)
        raise


def run_script(path: str, args: list[str]) -> None:
    """Runs a file, or a folder or zip file with a ``__main__.py``, as ``__main__``."""
    sys.argv[:] = [path, *args]
    if not os.path.exists(path):
        print(
            f"{sys.executable}: can't open file {os.path.abspath(path)!r}: [Errno 2] No such file or directory", file=sys.stderr
        )
        sys.exit(2)
    absolute = os.path.abspath(path)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _replace_path_entry(None)
        runpy.run_path(path, run_name="__main__")
        return
    _replace_path_entry(os.path.dirname(os.path.realpath(path)))
    with io.open_code(absolute) as file:
        source = file.read()
    module = _become_main(absolute, importlib.machinery.SourceFileLoader("__main__", absolute))
    exec(compile(source, absolute, "exec", dont_inherit=True), module.__dict__)


def run_standard_input(args: list[str]) -> None:
    """Run the code that is piped in as ``__main__``."""
    if sys.stdin.isatty():
        sys.exit(f"{USAGE}\n- reads a script that is piped in; at a prompt: import torch_compat; torch_compat.install()")
    sys.argv[:] = ["-", *args]
    _replace_path_entry("")
    source = sys.stdin.buffer.read()
    module = _become_main("<stdin>", importlib.machinery.BuiltinImporter)
    exec(compile(source, "<stdin>", "exec", dont_inherit=True), module.__dict__)


def run_module(name: str, args: list[str]) -> None:
    """Runs a module, or a package's ``__main__``, as ``__main__``."""
    sys.argv[:] = ["-m", *args]
    spec = _find_runnable(name)
    code = spec.loader.get_code(spec.name)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    if code is None:
        _no_module(f"No code object available for {name}")
    sys.argv[0] = spec.origin or name
    module = _become_main(spec.origin, spec.loader)
    module.__spec__ = spec
    module.__package__ = spec.parent
    module.__cached__ = spec.cached  # pyright: ignore[reportAttributeAccessIssue]
    exec(code, module.__dict__)


def _find_runnable(name: str) -> importlib.machinery.ModuleSpec:
    name = target_name(name) or name  # one of Lightning's: ours behind it
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            _no_module(f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed")
    if spec is None or not hasattr(spec.loader, "get_code"):
        _no_module(f"No module named {name}")
    return spec


def _no_module(message: str) -> NoReturn:
    print(f"{sys.executable}: {message}", file=sys.stderr)
    sys.exit(1)


def _become_main(path: str | None, loader: Any) -> types.ModuleType:
    """A fresh ``__main__``: pickles of its classes, and children that import it again, name the user's script."""
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __annotations__={}, __builtins__=__builtins__, __cached__=None, __file__=path, __loader__=loader, __package__=None
    )
    sys.modules["__main__"] = module
    return module


def _replace_path_entry(folder: str | None) -> None:
    """Puts the script's folder where ``python -m`` has put the current one; this package stays importable, at the end."""
    if sys.flags.safe_path:
        return
    sys.path[:1] = [] if folder is None else [folder]
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if ours not in sys.path:
        sys.path.append(ours)


def _report(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    """Calls the excepthook with a traceback that starts in the user's script."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OUR_FRAMES:
        traceback = traceback.tb_next
    hook(kind, error.with_traceback(traceback), traceback)


if __name__ == "__main__":
    main(sys.argv[1:])
