"""Stand-ins for the CUDA libraries that the registry's torchvision is linked against, where torch is built for the CPU.

Without them none of its ops can be loaded, and a library that imports torchvision cannot be imported.
"""

from __future__ import annotations

import ctypes
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import torch

# By its path: a library that ships its tests hides our folder `tests` in an environment.
_ELF = runpy.run_path(str(Path(__file__).resolve().parents[1] / "torch_xla" / "cuda_stubs.py"))
_OF_TORCH = re.compile(r"lib(torch_cuda|c10_cuda)\.so")
_RUNTIME = re.compile(r"libcudart\.so")


def write_stubs(folder: Path) -> bool:
    """Write the libraries into ``folder``, which goes into ``LD_LIBRARY_PATH``; False where none is needed."""
    spec = find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or spec.origin is None:
        return False
    package = Path(spec.origin).parent
    extensions = [_ELF["SharedObject"](path) for path in package.glob("*.so")]
    needed = {name for extension in extensions for name in extension.needed()}
    names = {name for extension in extensions for name, is_defined in extension.symbols() if not is_defined}
    left_over = sorted(name for name in names if b"4cuda" in name or b"c10_cuda" in name)
    names_library = _ELF["NAMES_LIBRARY"]
    (folder / names_library).write_bytes(_ELF["shared_object"](names_library, left_over))
    for name in filter(_OF_TORCH.match, needed):
        (folder / name).write_bytes(_ELF["shared_object"](name, needs=names_library))
    for name in filter(_RUNTIME.match, needed):  # called when the ops are loaded: the real one, which the wheel has, too
        bundled = next((package.parent / "torchvision.libs").glob("libcudart.*"), None)
        if bundled is not None and not _can_be_loaded(name):
            (folder / name).symlink_to(bundled)
    return bool(needed)


def _can_be_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
