"""Checkpoints that name what is to be called: every way to name it, at every kind of parameter."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from torch_compat.checkpoint.checkpoint_dict import save_checkpoint_dict
from torch_compat.demos.boring_classes import BoringModel

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
SABOTEUR = "xlatrain_saboteur"
"""A module on the path that nobody has imported: to import it is the harm."""


@dataclasses.dataclass
class Options:
    value: Any = None


class Block(nn.Module):
    """What an annotation says, with a parameter that says nothing."""

    def __init__(self, inner=None, width: int = 1) -> None:
        super().__init__()
        self.inner = inner


class Victim(BoringModel):
    """A parameter of every kind of annotation."""

    def __init__(
        self,
        untyped=None,
        anything: Any = None,
        function: Callable = print,
        factory: Callable[[bool], nn.Module] = nn.ReLU,
        block: Optional[nn.Module] = None,  # noqa: UP045
        kind: type = int,
        block_kind: type[nn.Module] = nn.ReLU,
        many: list[Any] | None = None,
        named: dict[str, Any] | None = None,
        mixed: str | Callable | None = None,
        module: types.ModuleType | None = None,
        options: Options | None = None,
        manager: contextlib.AbstractContextManager | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.given = locals()


PARAMETERS = (
    *("untyped", "anything", "function", "factory", "block", "kind", "block_kind", "many", "named", "mixed", "module"),
    *("options", "manager", "others"),
)


def harms(marker: Path) -> Iterator[Any]:
    """Values that leave ``marker`` behind, or import the saboteur, if what they name is called or imported."""
    command = f"touch {marker}"
    calls: list[tuple[str, dict[str, Any]]] = [
        ("os.system", {"command": command}),
        ("torch.os.system", {"command": command}),
        ("posix.system", {"command": command}),
        ("subprocess.Popen", {"args": command, "shell": True}),
        ("subprocess.run", {"args": command, "shell": True}),
        ("builtins.exec", {"source": f"open({str(marker)!r}, 'w')"}),
        ("builtins.open", {"file": str(marker), "mode": "w"}),
        ("pathlib.Path.write_text", {"self": str(marker), "data": ""}),
        ("shutil.copyfile", {"src": "/dev/null", "dst": str(marker)}),
        ("torch.save", {"obj": 1, "f": str(marker)}),
        (f"{SABOTEUR}.Anything", {}),
        ("tests.hostile.named_classes.Options", {"value": {"class_path": "os.system", "init_args": {"command": command}}}),
    ]
    for path, arguments in calls:
        spec = {"class_path": path, "init_args": arguments}
        yield spec
        yield {"class_path": path, "dict_kwargs": arguments}
        yield json.dumps(spec)
        yield json.dumps(json.dumps(spec))
        yield [spec]
        yield {"key": spec}
        yield path
        yield {"class_path": f"{__name__}.Block", "init_args": {"inner": spec}}
        yield {"class_path": f"{__name__}.Block", "init_args": {"inner": json.dumps(spec)}}
        yield {"value": spec}
        yield {"init_args": {"inner": spec}}


def hyperparameters(marker: Path) -> Iterator[dict[str, Any]]:
    """What a file may say of its module."""
    for parameter, harm in itertools.product(PARAMETERS, harms(marker)):
        yield {parameter: harm}
    for harm in harms(marker):
        if isinstance(harm, dict) and "class_path" in harm:
            arguments = harm.get("init_args") or harm.get("dict_kwargs") or {}
            yield {"_class_path": harm["class_path"], **arguments}
            yield {"_class_path": f"{__name__}.Victim", "untyped": harm}


def write(path: Path, arguments: dict[str, Any], *, directory: bool) -> Path:
    """A checkpoint of a command line's run that says so."""
    weights = BoringModel().state_dict()
    state = {"state_dict": weights, "hyper_parameters": {"_instantiator": INSTANTIATOR, **arguments}, "loops": {}}
    if directory:
        save_checkpoint_dict(path, state)
    else:
        torch.save(state, path)
    return path


def saboteur(directory: Path) -> None:
    """Put the module there that nobody may import."""
    (directory / f"{SABOTEUR}.py").write_text("class Anything:\n    pass\n")


def was_harmed(marker: Path) -> bool:
    return marker.exists() or SABOTEUR in sys.modules


def attempts(folder: Path, numbers: Iterable[int]) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Load the files of these numbers; there are some 2,000, and after the last the first comes again.

    Yields:
        The number, what the file says, and what came of it: an exception's type, or ``"loaded"``.

    Raises:
        AssertionError: something was called or imported.
    """
    marker = folder / "harmed"
    everything = list(hyperparameters(marker))
    for number in numbers:
        arguments = everything[number % len(everything)]
        path = write(folder / f"{number}.ckpt", arguments, directory=number % 2 == 1)
        outcome = "loaded"
        try:
            Victim.load_from_checkpoint(path)
        except Exception as error:  # which one it is, is for the caller to judge
            outcome = type(error).__name__
        assert not was_harmed(marker), arguments
        yield number, arguments, outcome
