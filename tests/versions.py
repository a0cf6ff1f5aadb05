"""The tests with other versions of torch and JAX that are supported than the suite's: ``python -m tests.versions``.

The suite itself runs with those of constraints.txt. Here each version gets a folder of its own in ``.venv-versions`` and
takes all other packages from the environment that runs this; a version that is not made for this Python gets another one,
and the other packages of constraints.txt. PyPI's torch for x86-64 Linux is linked against CUDA: it is installed without its
dependencies, beside stand-ins for the libraries that ``import torch`` looks for.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torch_xla.cuda_stubs import write_stubs

ROOT = Path(__file__).resolve().parents[1]
_HAS_CUDA_BUILDS = (platform.system(), platform.machine()) == ("Linux", "x86_64")
_CUDA = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85", "nvidia-cufile==1.15.1.6") if _HAS_CUDA_BUILDS else ()
_PYTHONS = [f"python3.{minor}" for minor in range(12, 16)]
_LEFT_OUT = ("libtpu==", "cuda-", "nvidia-", "triton==")  # made for another JAX; what torch's CUDA needs
SELECTION = (
    *("tests/test_internals.py", "tests/test_private_names.py", "tests/xlatrain/bridge", "tests/xlatrain/step/optimizers"),
    *("tests/xlatrain/step/test_engine.py", "tests/xlatrain/step/test_step.py", "tests/xlatrain/init"),
    "tests/xlatrain/xla/passes",
    *("tests/parity/test_parity.py", "-k", "not parity or basics"),
)


@dataclass(frozen=True)
class Environment:
    """An environment that is tested.

    Attributes:
        packages: the exact versions that are not those of constraints.txt.
        python: the oldest Python that they are made for.
    """

    packages: tuple[str, ...]
    python: tuple[int, int] = (3, 11)

    def has_this_python(self) -> bool:
        """Whether the packages of the environment that runs this will do."""
        return sys.version_info >= self.python

    def others(self) -> Iterator[str]:
        """The rest of constraints.txt, as far as a CPU needs it."""
        names = tuple(f"{package.partition('==')[0]}==" for package in self.packages)
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            if not line.startswith(("#", *_LEFT_OUT, *names)):
                yield line


VERSIONS = {
    "torch-2.11": Environment(("torch==2.11.0", *_CUDA)),
    "torch-2.12": Environment(("torch==2.12.1", *_CUDA)),
    "jax-0.10.0": Environment(("jax==0.10.0", "jaxlib==0.10.0")),
    "jax-0.11": Environment(("jax==0.11.2", "jaxlib==0.11.2", "flax==0.12.12", *_CUDA), (3, 12)),
}


def python_of(name: str) -> Path:
    """The interpreter of the environment ``name``, which is made if it is not there or has other versions.

    Raises:
        FileNotFoundError: no Python on the ``PATH`` is new enough.
    """
    environment = VERSIONS[name]
    folder = ROOT / ".venv-versions" / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    packages = [*environment.packages, *([] if environment.has_this_python() else environment.others())]
    wanted = "\n".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    base = sys.executable if environment.has_this_python() else _python_since(environment.python)
    subprocess.run([base, "-m", "venv", "--clear", "--without-pip", "--symlinks", str(folder)], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*install, *packages], check=True)
    if _HAS_CUDA_BUILDS and (site_packages / "torch").is_dir():
        write_stubs(site_packages)
    if environment.has_this_python():
        ours = sysconfig.get_path("purelib")
        (site_packages / "others.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    else:
        subprocess.run([*install, "--no-build-isolation", "--editable", str(ROOT)], check=True)
    stamp.write_text(wanted)
    return python


def _python_since(oldest: tuple[int, int]) -> str:
    for name in _PYTHONS:
        found = shutil.which(name)
        is_new = f"import sys; sys.exit(sys.version_info < {oldest})"  # a launcher of pyenv may be there without a Python
        if found and subprocess.run([found, "-c", is_new], check=False, capture_output=True).returncode == 0:
            return found
    raise FileNotFoundError(f"Python {'.'.join(map(str, oldest))} or later is needed; the PATH has none of {', '.join(_PYTHONS)}")


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
    try:
        python = python_of(name)
    except FileNotFoundError as error:
        print(error)
        return False
    command = [str(python), "-m", "pytest", "-q", "-n", jobs, "--dist", "loadgroup", *selection]
    as_for_users = os.environ | {"XLA_FLAGS": ""}  # other jaxlibs may not know the flags of tests/compiling.py
    return subprocess.run(command, cwd=ROOT, env=as_for_users, check=False).returncode == 0


if __name__ == "__main__":
    main()
