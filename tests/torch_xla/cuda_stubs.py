"""Lets CUDA builds of PyTorch be imported where there is no CUDA: ``python tests/torch_xla/cuda_stubs.py SITE_PACKAGES``.

PyPI's torch 2.9 for x86-64 Linux, the only one that torch_xla 2.9 loads with, is linked against two gigabytes of CUDA libraries
that a process on a CPU or a TPU never calls. This writes, next to torch's own libraries, an empty library for each that is not
installed, and one that defines the names that are then left over; calling one of these ends the process (``ud2``). It needs no
compiler: the files are ELF images of a few kilobytes. Layout: System V ABI, https://refspecs.linuxfoundation.org/elf/gabi4+/.
"""

from __future__ import annotations

import platform
import re
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

NAMES_LIBRARY = "libcuda_names.so"
_NVIDIA = re.compile(rb"(_*cu|nv|nccl)", re.IGNORECASE)
_NVIDIA_LIBRARY = re.compile(r"lib(cu|nv|nccl).*\.so")
_ONLY_WITH_CUDA = ("libcaffe2_nvrtc.so",)  # loaded when a kernel is compiled at run time
_PAGE = 4096
_DYNSYM, _DYNAMIC = 11, 6
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME, _DT_RUNPATH = 1, 4, 5, 6, 10, 11, 14, 29
_Section = tuple[int, int, int, int]  # type, file offset, size, index of the string table


def write_stubs(site_packages: Path) -> list[str]:
    """Write what ``import torch`` misses in ``site_packages``; gives the names of the files, none where nothing is missing."""
    folder = site_packages / "torch" / "lib"
    torch_libraries = [SharedObject(path) for path in sorted(folder.glob("*.so*")) if path.name not in _ONLY_WITH_CUDA]
    installed = [SharedObject(path) for path in sorted((site_packages / "nvidia").glob("*/lib/*.so*"))]
    present = {path.name for path in (*folder.glob("*.so*"), *(site_packages / "nvidia").glob("*/lib/*.so*"))}
    needed = {name for library in torch_libraries for name in library.needed() if _NVIDIA_LIBRARY.match(name)}
    missing = sorted(needed - present)
    if not missing:
        return []
    defined, undefined = set[bytes](), set[bytes]()
    for library in (*torch_libraries, *installed):
        for name, is_defined in library.symbols():
            (defined if is_defined else undefined).add(name)
    left_over = sorted(name for name in undefined - defined if _NVIDIA.match(name))
    # Names are bound by version to the library that was linked: one that defines them must not have that library's name.
    (folder / NAMES_LIBRARY).write_bytes(shared_object(NAMES_LIBRARY, left_over))
    for name in missing:
        (folder / name).write_bytes(shared_object(name, needs=NAMES_LIBRARY))
    return [NAMES_LIBRARY, *missing]


class SharedObject:
    """The dynamic symbols and dependencies of a 64-bit little-endian ELF file."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        at, size, count = self._header()
        sections = [struct.unpack_from("<4xI16xQQI", self._data, at + i * size) for i in range(count)]
        self._sections: list[_Section] = [(kind, offset, length, link) for kind, offset, length, link in sections]

    def _header(self) -> tuple[int, int, int]:
        if self._data[:6] != b"\x7fELF\x02\x01":
            return 0, 0, 0  # a linker script
        (at,) = struct.unpack_from("<Q", self._data, 40)
        size, count = struct.unpack_from("<HH", self._data, 58)
        return at, size, count

    def _table(self, kind: int, entry: str) -> Iterator[tuple[tuple[int, ...], int]]:
        """The entries of the sections of a kind, each with the file offset of its strings."""
        for found, offset, length, link in self._sections:
            if found == kind:
                for values in struct.iter_unpack(entry, memoryview(self._data)[offset : offset + length]):
                    yield values, self._sections[link][1]

    def _text(self, at: int) -> bytes:
        return self._data[at : self._data.index(b"\0", at)]

    def symbols(self) -> Iterator[tuple[bytes, bool]]:
        """Each dynamic symbol's name, and whether this file defines it."""
        for (name, section), strings in self._table(_DYNSYM, "<I2xH16x"):
            yield self._text(strings + name), section != 0

    def needed(self) -> Iterator[str]:
        """The libraries that are loaded with this one."""
        for (tag, value), strings in self._table(_DYNAMIC, "<QQ"):
            if tag == _DT_NEEDED:
                yield self._text(strings + value).decode()


def shared_object(soname: str, names: Sequence[bytes] = (), needs: str | None = None) -> bytes:
    """A shared library that defines ``names``, all at an instruction that ends the process.

    One page of code, and one with the tables: two segments, since the loader writes to the dynamic section.
    """
    strings = b"\0"
    starts: dict[bytes, int] = {}
    extra = [text for text in (needs, "$ORIGIN") if text is not None]
    for name in (*names, soname.encode(), *(text.encode() for text in extra)):
        starts[name] = len(strings)
        strings += name + b"\0"
    symbols = bytes(24) + b"".join(struct.pack("<IBBHQQ", starts[name], 0x10, 0, 1, _PAGE, 0) for name in names)
    code = b"\x0f\x0b"
    parts = {_DT_HASH: _hash_table(names), _DT_SYMTAB: symbols, _DT_STRTAB: strings}
    entries = {_DT_SONAME: starts[soname.encode()], _DT_STRSZ: len(strings), _DT_SYMENT: 24, _DT_RUNPATH: starts[b"$ORIGIN"]}
    if needs is not None:
        entries[_DT_NEEDED] = starts[needs.encode()]
    tables, at = b"", 2 * _PAGE
    for tag, part in parts.items():
        entries[tag] = at + len(tables)
        tables += part + bytes(-len(part) % 8)
    dynamic_at = at + len(tables)
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in (*entries.items(), (0, 0)))
    tables += dynamic
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    header += _segment(1, 5, _PAGE, len(code), _PAGE) + _segment(1, 6, at, len(tables), _PAGE)
    header += _segment(2, 6, dynamic_at, len(dynamic), 8) + _segment(0x6474E551, 6, 0, 0, 16)  # a stack that is not executable
    return header.ljust(_PAGE, b"\0") + code.ljust(_PAGE, b"\0") + tables


def _segment(kind: int, flags: int, at: int, size: int, alignment: int) -> bytes:
    return struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, alignment)


def _hash_table(names: Sequence[bytes]) -> bytes:
    """The System V hash table of symbols 1, 2, …"""
    buckets, chains = [0] * max(len(names), 1), [0] * (len(names) + 1)
    for index, name in enumerate(names, start=1):
        bucket = _hash(name) % len(buckets)
        chains[index], buckets[bucket] = buckets[bucket], index
    return struct.pack(f"<{2 + len(buckets) + len(chains)}I", len(buckets), len(chains), *buckets, *chains)


def _hash(name: Iterable[int]) -> int:
    value = 0
    for character in name:
        value = (value << 4) + character
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def write_python_stub(site_packages: Path) -> list[str]:
    """For an interpreter that is not a shared library: torch_xla asks for one, whose names the interpreter itself has.

    Loading a system's libpython into such a process would bring a second, uninitialised Python.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return []
    path = site_packages / "torch_xla" / "lib" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(shared_object(name))
    return [name]


if __name__ == "__main__":
    if sys.platform != "linux" or platform.machine() != "x86_64":
        sys.exit(f"torch_xla 2.9 is built for x86-64 Linux only; this is {platform.machine()} {sys.platform}")
    found = Path(sys.argv[1])
    print("stand-ins:", *write_stubs(found), *write_python_stub(found))
