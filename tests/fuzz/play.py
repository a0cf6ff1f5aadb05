"""Runs scripts that :mod:`tests.fuzz.programs` made: ``play.py DEVICES OUT PROGRAM…``; one JSON file for each in OUT."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import random
import sys
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

EAGERLY = ("Steps run eagerly", "Modules run in plain torch")
"""The beginning of a warning: of the Trainer's, of Fabric's."""


def plain(value: Any) -> Any:
    """A value as JSON has it; tensors as lists, anything unknown by its class."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().double().tolist()
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return f"a {type(value).__name__}"


def play(path: Path, devices: int) -> dict[str, Any]:
    """What the script of ``path`` wrote down; ``printed``: its lines; ``eager``: why steps ran eagerly."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    linecache.checkcache(str(path))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
            found, _ = module.main(devices)
            record: dict[str, Any] = {name: plain(value) for name, value in found.items()}
        except BaseException as error:
            record = {"outside": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
    record["printed"] = [line for line in printed.getvalue().splitlines() if line.startswith("P")]
    said = [str(one.message) for one in caught]
    record["eager"] = next((one for one in said if any(text in one for text in EAGERLY)), None)
    del sys.modules[path.stem]
    return record


def main() -> None:
    devices, out, *paths = sys.argv[1:]
    os.chdir(out)
    for path in map(Path, paths):
        (Path(out) / f"{path.stem}.json").write_text(json.dumps(play(path, int(devices))))


if __name__ == "__main__":
    main()
