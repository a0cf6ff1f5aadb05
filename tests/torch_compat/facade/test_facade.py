"""Small calls of Lightning's public names answer as stock's do: values, kinds of errors, categories of warnings, printed text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import compiling, warm

pytestmark = [pytest.mark.parity, pytest.mark.slow]

HERE = Path(__file__).parent
_ROOT = HERE.parents[2]

# What stock raises by accident, deep inside: any error that says more will do.
_ACCIDENTS = ("AssertionError", "AttributeError", "IndexError")

# Questions that are answered differently here, and why; everything else must agree.
BETTER = {
    "fits_empty": "a list without batches is refused; stock trains nothing and says so in a warning",
    "half_wrong": "a precision that is none is refused; stock computes in bfloat16",
    "environments_alone": "one process for each host: SLURM's and torchrun's counts mean hosts; LSF names the missing host",
    "migrates": "checkpoints of 1.x are read as they are: nothing to list",
    "module_tensorrt": "refused by name",
    "size_of_dataclass": "a text beside the tensors makes no batch size ambiguous",
    "summary": "`other params` are listed at any depth: stock counts children twice (98 of 59 parameters)",
    "summary_members": "as `summary`",
    "summary_shallow": "as `summary`",
    "swa_text": "refused when made; stock fails in the run",
    "tensorboard_vector": "a ValueError for whatever cannot be logged",
    "throughput_window": "refused when made; stock fails in the run",
    "trainer_benchmark_0": "another kind of error",
    "trainer_precision_3": "an unknown precision is a ValueError; stock fails later",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stock's answers and ours, from a process each."""
    folder = tmp_path_factory.mktemp("facade")
    return _answers(warm.STOCK, folder / "stock.json"), _answers(warm.OURS, folder / "ours.json", "-m", "torch_compat")


def _answers(preloaded: tuple[str, ...], out: Path, *prefix: str) -> dict[str, Any]:
    environment = compiling.environment() | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{HERE}", "JAX_PLATFORMS": "cpu"}
    done = warm.run(preloaded, [*prefix, str(HERE / "questions.py"), str(out)], env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def differences(stock: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Where two answers differ. Messages may; an error must be caught by what catches stock's."""
    if isinstance(stock, dict) and isinstance(ours, dict):
        if "raises" in stock:
            accident = stock["raises"][0] in _ACCIDENTS
            if "raises" not in ours or not (accident or set(stock["raises"]) <= set(ours["raises"])):
                yield f"{path}: stock raises {stock['raises']}: {stock['message']}; here {ours}"
            return
        if "raises" in ours:
            yield f"{path}: stock gives {stock}; here {ours}"
            return
        for key in stock.keys() | ours.keys():
            if key == "warns":
                yield from _warning_differences(stock.get(key, []), ours.get(key, []), path)
            elif key != "logs" and not (key == "kind" and {stock.get(key), ours.get(key)} == {"dict", "OrderedDict"}):
                yield from differences(stock.get(key), ours.get(key), f"{path}.{key}")
    elif isinstance(stock, list) and isinstance(ours, list) and len(stock) == len(ours):
        for index, (one, other) in enumerate(zip(stock, ours, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif stock != ours:
        yield f"{path}: stock {stock!r}; here {ours!r}"


def _warning_differences(stock: list[Any], ours: list[Any], path: str) -> Iterator[str]:
    if [category for category, _ in stock] != [category for category, _ in ours]:
        yield f"{path}: stock warns {stock}; here {ours}"


def is_stricter(name: str, stock: dict[str, Any], ours: dict[str, Any]) -> bool:
    """A Trainer argument that cannot work is refused at once, where stock takes it and fails later, or never."""
    return name.startswith("trainer_") and "raises" not in stock and "MisconfigurationException" in ours.get("raises", ())


def test_same_answers(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, ours = answers
    assert stock.keys() == ours.keys()
    assert len(stock) > 400
    found = {
        name: list(differences(stock[name], ours[name]))[:4]
        for name in stock
        if name not in BETTER and not is_stricter(name, stock[name], ours[name])
    }
    found = {name: lines for name, lines in found.items() if lines}
    assert not found, json.dumps(found, indent=1)[:12000]


def test_errors_begin_with_the_same_words(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, ours = answers
    named = [name for name in stock if name.startswith("said_")]
    assert len(named) > 40
    found = {
        name: [stock[name], ours[name]]
        for name in named
        if "message" not in stock[name] or _beginning(stock[name]["message"]) != _beginning(ours[name].get("message", ""))
    }
    assert not found, json.dumps(found, indent=1)


def _beginning(message: str) -> list[str]:
    return re.findall(r"\w+", message)[:4]


def test_accepted_differences_are_still_there(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, ours = answers
    assert [name for name in BETTER if not list(differences(stock[name], ours[name]))] == []


def test_differences_are_found() -> None:
    error = {"raises": ["ValueError"], "message": "a"}
    assert list(differences(error, {"raises": ["Own", "ValueError"], "message": "b"})) == []
    assert list(differences(error, {"raises": ["TypeError"], "message": "a"}))
    assert list(differences({"raises": ["AssertionError"], "message": ""}, error)) == []
    assert list(differences({"value": 1, "warns": [["UserWarning", "a"]]}, {"value": 1, "warns": [["UserWarning", "b"]]})) == []
    assert list(differences({"value": 1}, {"value": 1, "warns": [["UserWarning", "b"]]}))
    assert list(differences({"value": [1, {"a": 2}]}, {"value": [1, {"a": 3}]})) == [".value[1].a: stock 2; here 3"]
