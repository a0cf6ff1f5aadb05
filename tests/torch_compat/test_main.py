"""``python -m torch_compat script.py`` behaves as ``python script.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(*args: str, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, input=text, capture_output=True, text=True, timeout=300, check=False
    )


def assert_as_python(*args: str, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs ``python *args`` and ``python -m torch_compat *args`` and compares all that can be seen from outside."""
    plain = run(*args, cwd=cwd, text=text)
    ours = run("-m", "torch_compat", *args, cwd=cwd, text=text)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return ours


SCRIPTS = {
    "environment": """
import sys
print(sys.argv, sys.path[0], __name__, __file__, __spec__, __package__)
import __main__
print(__main__.__dict__ is globals(), sorted(globals()))
""",
    "exit code": "import sys; sys.exit(7)",
    "exit message": "raise SystemExit('that was it')",
    "traceback": """
def outer():
    inner()
def inner():
    try:
        int('x')
    except ValueError as error:
        raise RuntimeError('after all') from error
outer()
""",
    "syntax error": "def f(:\n",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)",
    "own excepthook": """
import sys
sys.excepthook = lambda kind, error, traceback: print(kind.__name__, traceback.tb_frame.f_code.co_name)
1 / 0
""",
    "exit handlers": """
import atexit, threading
atexit.register(print, 'bye')
threading.Thread(target=print, args=('hi',)).start()
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(SCRIPTS[name])
    assert_as_python("folder/script.py", "--flag", "-m", cwd=tmp_path)


@pytest.mark.parametrize("name", ["environment", "exit code", "traceback", "syntax error"])
def test_standard_input(tmp_path: Path, name: str) -> None:
    assert_as_python("-", "--flag", cwd=tmp_path, text=SCRIPTS[name])


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    result = assert_as_python("nothing.py", cwd=tmp_path)
    assert result.returncode == 2


def test_a_module_and_a_package(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    text = "import sys\nprint(sys.argv, sys.path[0], __name__, __package__, __spec__.name)\nassert len(sys.argv) == 1, 'too many'"
    (tmp_path / "package" / "__main__.py").write_text(text)
    (tmp_path / "module.py").write_text(text)
    for name in ("package", "module", "package.__main__"):
        assert assert_as_python("-m", name, cwd=tmp_path).returncode == 0
        # Here Python itself shows frames of runpy; ours start in the user's file as for a script.
        failed = run("-m", "torch_compat", "-m", name, "more", cwd=tmp_path)
        assert failed.returncode == 1
        assert failed.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}')
    missing = run("-m", "torch_compat", "-m", "no_such_module", cwd=tmp_path)
    assert missing.returncode == 1
    assert "No module named no_such_module" in missing.stderr


def test_a_folder_and_a_zip_file(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import sys, helper\nprint(sys.argv, __name__)")
    (tmp_path / "app" / "helper.py").write_text("")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for file in ("__main__.py", "helper.py"):
            archive.write(tmp_path / "app" / file, file)
    for target in ("app", "app.zip"):
        result = run("-m", "torch_compat", target, "x", cwd=tmp_path)
        assert result.stdout == f"['{target}', 'x'] __main__\n", result.stderr


def test_usage(tmp_path: Path) -> None:
    assert run("-m", "torch_compat", cwd=tmp_path).returncode == 2
    assert "usage: python -m torch_compat" in run("-m", "torch_compat", "--help", cwd=tmp_path).stdout
    assert "unknown option -x" in run("-m", "torch_compat", "-x", cwd=tmp_path).stderr


def test_the_package_stays_importable_when_it_was_found_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import lightning.pytorch.demos.boring_classes, xlatrain.mesh.mesh; print('ok')")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", "torch_compat", str(tmp_path / "script.py")],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout == "ok\n", result.stderr


def test_a_module_under_lightnings_name(tmp_path: Path) -> None:
    done = run("-m", "torch_compat", "-m", "lightning.pytorch.utilities.upgrade_checkpoint", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
