"""The tests with the oldest versions of torch and JAX that are supported, and those between: ``python -m tests.versions``.

The suite itself runs with the newest (constraints.txt). Here each version gets a folder of its own in ``.venv-versions`` and
takes all other packages from the environment that runs this. PyPI's torch for x86-64 Linux is linked against CUDA: it is
installed without its dependencies, beside stand-ins for the libraries that ``import torch`` looks for.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.torch_xla.cuda_stubs import write_stubs

ROOT = Path(__file__).resolve().parents[1]
_HAS_CUDA_BUILDS = (platform.system(), platform.machine()) == ("Linux", "x86_64")
_CUDA = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85", "nvidia-cufile==1.15.1.6") if _HAS_CUDA_BUILDS else ()
VERSIONS = {
    "torch-2.11": ("torch==2.11.0", *_CUDA),
    "torch-2.12": ("torch==2.12.1", *_CUDA),
    "jax-0.10.0": ("jax==0.10.0", "jaxlib==0.10.0"),
}
SELECTION = (
    *("tests/xlatrain/bridge", "tests/xlatrain/optimizers", "tests/xlatrain/test_engine.py", "tests/xlatrain/test_step.py"),
    *("tests/parity/test_parity.py", "-k", "not parity or basics"),
)


def python_of(name: str) -> Path:
    """The interpreter of the environment ``name``, which is made if it is not there or has other versions."""
    folder = ROOT / ".venv-versions" / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(VERSIONS[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # pip of this environment: that folder has none, and must not see what is installed here
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *VERSIONS[name]]
    subprocess.run(install, check=True)
    if _HAS_CUDA_BUILDS and (packages / "torch").is_dir():
        write_stubs(packages)
    ours = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    stamp.write_text(wanted)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}; default: all")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="arguments of pytest instead of the usual tests")
    args = parser.parse_args()
    if unknown := set(args.names) - set(VERSIONS):
        parser.error(f"unknown versions {', '.join(sorted(unknown))}; there are {', '.join(VERSIONS)}")
    failed = [name for name in args.names or VERSIONS if not passes(name, args.jobs, args.pytest or SELECTION)]
    sys.exit(f"failed with {', '.join(failed)}" if failed else 0)


def passes(name: str, jobs: str, selection: Sequence[str]) -> bool:
    print(f"== {name}", flush=True)
    command = [str(python_of(name)), "-m", "pytest", "-q", "-n", jobs, "--dist", "loadgroup", *selection]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    main()
