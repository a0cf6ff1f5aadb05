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
from tests.stock_runs import kept_result

pytestmark = [pytest.mark.parity, pytest.mark.slow]

HERE = Path(__file__).parent
_ROOT = HERE.parents[2]

# What stock raises by accident, deep inside: any error that says more will do.
_ACCIDENTS = ("AssertionError", "AttributeError", "IndexError")

# Questions that are answered differently here, and why; everything else must agree.
BETTER = {
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


# Errors that begin with other words than stock's, and why; all others begin with its first four.
OTHER_WORDS = {
    **dict.fromkeys(("comet_missing", "mlflow_missing", "wandb_missing"), "which logger needs it is named"),
    **dict.fromkeys(("swa_rate", "swa_rate_list", "swa_rate_negative"), "stock's sentence has no verb"),
    "tensorboard_text": "one error for whatever cannot be logged",
    "uncompiled": "what was found is named",
}
_OF_PYTHON = re.compile(
    r"'.+' (object|is an invalid keyword)|invalid literal|.+ not supported between|unsupported type|.*expect(s|ed) "
)
"""Errors of Python's own and of torch's, which stock lets through where it does not look at an argument."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stock's answers and ours, from a process each."""
    folder = tmp_path_factory.mktemp("facade")
    stock = kept_result(HERE / "questions.py", [], lambda: _answers(warm.STOCK, folder / "stock.json"))
    return stock, _answers(warm.OURS, folder / "ours.json", "-m", "torch_compat")


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
    both = [name for name in stock if "message" in stock[name] and "message" in ours[name]]
    assert len(both) > 150
    assert {name for name in stock if name.startswith("said_")} <= set(both)
    found = {
        name: [stock[name], ours[name]]
        for name in both
        if name not in BETTER and not _OF_PYTHON.match(stock[name]["message"])
        if not _begin_alike(stock[name]["message"], ours[name]["message"])
    }
    assert found.keys() == OTHER_WORDS.keys(), json.dumps(
        {name: found[name] for name in found if name not in OTHER_WORDS}, indent=1
    )


def test_warnings_begin_with_the_same_words(answers: tuple[dict[str, Any], dict[str, Any]]) -> None:
    stock, ours = answers
    pairs = [pair for name in stock for pair in zip(stock[name].get("warns", ()), ours[name].get("warns", ()), strict=False)]
    assert len(pairs) > 40
    assert [pair for pair in pairs if not _begin_alike(pair[0][1], pair[1][1])] == []


def _begin_alike(stock: str, ours: str) -> bool:
    first = re.findall(r"\w+", stock)[:4]
    return re.findall(r"\w+", ours)[: len(first)] == first


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
