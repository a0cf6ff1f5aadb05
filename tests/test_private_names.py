"""docs/private_names.toml: every private name of another library that the packages use, there and with the signature it had.

A name that a release renames is seen here, in one place, with what it is for. Without the table it would be found by whoever
meets the error, or by nobody: what is set under a name that nobody reads switches nothing.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch.distributed.tensor.parallel import style

from tests import test_internals
from tests.private_uses import Use, all_uses, defined_in, is_private, sources, uses_in

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "docs/private_names.toml").read_text())
ANY = ("any",)
MAY_BE_MISSING = ("torch_xla", "wandb")  # not in the environment of the suite


@dataclass(frozen=True)
class Row:
    name: str
    purpose: str
    instead: str
    signatures: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for entry in TABLE["private"]:
        assert entry.keys() - {"signature"} == {"names", "purpose", "instead"}, entry
        wanted = entry.get("signature", [])
        signatures = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        found += [Row(name, entry["purpose"], entry["instead"], signatures) for name in entry["names"]]
    return found


_STOCK: dict[str, Any] = {}  # modules of the real Lightning, which are in sys.modules while one of its names is looked up


def resolve(name: str) -> Any:
    """:func:`tests.test_internals.resolve`; the real Lightning is not left behind in a process whose tests install its names."""
    if not name.startswith("lightning."):
        return test_internals.resolve(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which its import sets
        sys.modules.update(_STOCK)
        try:
            return test_internals.resolve(name)
        finally:
            _STOCK.update({name: module for name, module in sys.modules.items() if name.partition(".")[0] == "lightning"})
            for module in _STOCK:
                sys.modules.pop(module, None)


# -- what is used, and in the table --------------------------------------------------------------------------------------


def last_of(name: str) -> str:
    """The attribute, keyword or function that a dotted name ends with."""
    return re.split(r"[.(]", name.removesuffix(")"))[-1]


def named_by(use: Use) -> list[str]:
    """The names of rows that ``use`` is a use of, if there are such: itself and what it lies below, or any that end with it."""
    if "." not in use.name or use.text:
        return [f"*{use.name}"]
    parts = use.name.split(".")
    return [use.name, *(".".join(parts[:count]) for count in range(2, len(parts)) if "(" not in use.name)]


def unlisted(uses: Iterable[Use], names: Iterable[str]) -> list[str]:
    """``file:line: name`` of private uses that none of the names is."""
    known = {key for name in names for key in (name, f"*{last_of(name)}")}
    return [f"{use.where}: {use.name}" for use in uses if known.isdisjoint(named_by(use)) and needs_row(use)]


def unused(names: Iterable[str], uses: Iterable[Use]) -> list[str]:
    used = {key for use in uses for key in named_by(use)}
    return [name for name in names if used.isdisjoint((name, f"*{last_of(name)}"))]


def needs_row(use: Use) -> bool:
    """Whether a use is of a private name of another library, or replaces one of its names."""
    name, top = use.name, use.name.partition(".")[0]
    if name in TABLE["formats"] or last_of(name) in TABLE["ours"] or name.startswith("_xlatrain_") or is_op(name):
        return False
    if "." not in name or use.text:
        own = name in own_names() and (use.own or name not in names_of_examples())
        return not own and not is_module(name) and not (use.text and name in names_of_lightning())
    if use.own:  # a method of a class of ours: private, and of the library's class too?
        return is_there(name)
    return not is_module(name) and (is_private(name) or top not in sys.stdlib_module_names)


@functools.cache
def is_op(name: str) -> bool:
    """Whether ATen has the op: with its namespace, with or without an overload, or alone."""
    known = next((name.removeprefix(prefix) for prefix in ("torch.ops.aten.", "aten.") if name.startswith(prefix)), name)
    found: Any = torch.ops.aten
    for part in known.split("."):
        found = getattr(found, part, None)
    return found is not None


@functools.cache
def is_module(name: str) -> bool:
    try:
        return inspect.ismodule(resolve(name))
    except (AttributeError, ImportError, ValueError):
        return False


@functools.cache
def own_names() -> frozenset[str]:
    return frozenset(name for path in sources(ROOT) for name in defined_in(path.read_text()))


@functools.cache
def names_of_lightning() -> frozenset[str]:
    """Private names that stock Lightning defines: here they are refused, or other objects."""
    spec = importlib.util.find_spec("lightning")
    assert spec is not None and spec.submodule_search_locations
    files = Path(spec.submodule_search_locations[0]).rglob("*.py")
    return frozenset(name for path in files for name in defined_in(path.read_text()) if is_private(name))


# -- what is there -------------------------------------------------------------------------------------------------------


def _optimizer() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


def _grain_loader() -> Any:
    import grain

    sampler = grain.samplers.SequentialSampler(1, grain.sharding.NoSharding())
    return grain.DataLoader(data_source=[1], sampler=sampler, operations=[])


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


EXAMPLES: dict[str, Callable[[], Any]] = {  # objects whose attributes their classes do not show
    "torch.nn.Module": lambda: torch.nn.Linear(1, 1),
    "torch.nn.RNNBase": lambda: torch.nn.LSTM(1, 1),
    "torch.Tensor": lambda: torch.nn.Parameter(torch.ones(1)),
    "torch.UntypedStorage": lambda: torch.ones(1).untyped_storage(),
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch._dynamo.OptimizedModule": lambda: torch.compile(torch.nn.Linear(1, 1)),
    "torch.jit.ScriptFunction": lambda: torch.jit.script(_same),
    "torch.optim.Optimizer": _optimizer,
    "torch.utils.data.DataLoader": lambda: torch.utils.data.DataLoader([1]),  # pyright: ignore[reportArgumentType]
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter": lambda: iter(torch.utils.data.DataLoader([1])),  # pyright: ignore[reportArgumentType]
    "torchmetrics.Metric": torchmetrics.MeanMetric,
    "torchmetrics.MetricCollection": lambda: torchmetrics.MetricCollection([]),
    "grain.DataLoader": _grain_loader,
    "lightning.pytorch.Trainer": lambda: resolve("lightning.pytorch.Trainer")(accelerator="cpu", barebones=True),
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization": lambda: resolve(
        "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization"
    )(None),
}


@functools.cache
def example(kind: str) -> Any:
    return EXAMPLES[kind]()


@functools.cache
def names_of_examples() -> frozenset[str]:
    """Private attributes that objects of libraries have."""
    ours_too = ("torch._dynamo.OptimizedModule", *(kind for kind in EXAMPLES if kind.startswith("lightning.")))
    of_objects = {name for kind in EXAMPLES if kind not in ours_too for name in dir(example(kind))}
    return frozenset(filter(is_private, of_objects | set(dir(style.ColwiseParallel))))


def find(name: str) -> Any:
    """The object of a row's name.

    Raises:
        AttributeError, ImportError: it is not there.
    """
    path, _, argument = name.removesuffix(")").partition("(")
    if argument:
        function = resolve(path)
        if argument not in inspect.signature(function).parameters:
            raise AttributeError(f"{path} has no parameter {argument!r}")
        return function
    for kind in EXAMPLES:
        if path.startswith(f"{kind}."):
            rest = path.removeprefix(f"{kind}.")
            first = rest.partition(".")[0]
            owner = resolve(kind)
            found = owner if hasattr(owner, first) and "." not in rest else example(kind)
            for part in rest.split("."):
                found = getattr(found, part)
            return found
    return resolve(path)


def is_there(name: str) -> bool:
    try:
        find(name)
    except (AttributeError, ImportError):
        return False
    return True


def missing(names: Iterable[str]) -> Iterator[str]:
    """Names that are not there, each with the reason."""
    for name in names:
        top = name.partition(".")[0]
        if top in MAY_BE_MISSING and importlib.util.find_spec(top) is None:
            continue
        try:
            find(name)
        except (AttributeError, ImportError) as error:
            yield f"{name}: {error}"


# -- signatures ----------------------------------------------------------------------------------------------------------


def signature(function: Any) -> str | None:
    """Parameters, with ``=…`` for a default; from the docstring where a function is C++'s. None where nothing says them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented(function)
    plain = [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...) for p in parameters]
    return str(inspect.Signature(plain)).replace("=Ellipsis", "=…")


def _documented(function: Any) -> str | None:
    """The signature that a docstring begins with, of what is written in C++."""
    head = re.match(r"\s*(\w+\(.*?\))( ->|:|$)", getattr(function, "__doc__", None) or "", re.DOTALL)
    if inspect.isclass(function) or not callable(function) or head is None:
        return None
    try:
        (definition,) = ast.parse(f"def {' '.join(head[1].split())}: ...").body
    except SyntaxError:
        return None
    assert isinstance(definition, ast.FunctionDef)
    names = [argument.arg for argument in definition.args.args]
    defaults = len(names) - len(definition.args.defaults)
    return f"({', '.join(name + '=…' * (i >= defaults) for i, name in enumerate(names))})"


def changed(entries: Iterable[Row], look_up: Callable[[str], Any] = find) -> Iterator[str]:
    """Rows whose functions have another signature than the table says."""
    for row in entries:
        if row.signatures not in ((), ANY) and (found := signature(look_up(row.name))) not in row.signatures:
            yield f"{row.name}{found}, where the table has {' or '.join(row.signatures)}: {row.purpose}"


def without_signature(entries: Mapping[str, Row], uses: Iterable[Use]) -> Iterator[str]:
    """Functions that are replaced, and whose signatures the table does not have."""
    for name in {use.name for use in uses if use.replaced and use.name in entries}:
        last = name.rpartition(".")[2]
        if name.partition(".")[0] in MAY_BE_MISSING or (last.startswith("__") and last.endswith("__")):
            continue  # Python says what special methods take
        found = find(name)
        if callable(found) and not inspect.isclass(found) and signature(found) and not entries[name].signatures:
            yield f"{name}{signature(found)}"


# -- tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uses() -> list[Use]:
    return all_uses(ROOT)


def test_every_use_is_in_the_table(uses: list[Use]) -> None:
    names = {row.name for row in rows()}
    assert unlisted(uses, names) == [], "say in docs/private_names.toml what it is for, or do without it"


def test_every_row_is_used_once_in_the_table(uses: list[Use]) -> None:
    names = [row.name for row in rows()]
    assert unused(names, uses) == []
    assert sorted(set(names)) == sorted(names)
    said = {name for use in uses for name in (use.name, last_of(use.name))}
    assert [name for name in (*TABLE["ours"], *TABLE["formats"]) if name not in said] == []


def test_every_name_is_there() -> None:
    assert list(missing(row.name for row in rows())) == []


def test_signatures_are_those_that_the_table_has(uses: list[Use]) -> None:
    by_name = {row.name: row for row in rows()}
    assert list(without_signature(by_name, uses)) == []
    assert list(changed(by_name.values())) == []


SOURCE = """
import torch
from torch.fx import experimental
from torch.utils import data as loading
from functools import lru_cache

class Module(torch.nn.Module):
    def _apply(self, fn): ...
    def _gone(self): ...

def run(tensor, name):
    functions = torch._C
    functions._gone(tensor)

def other(torch):
    torch._of_an_argument

with patched([(torch.compiler, "_gone", True), (torch, "manual_seed", run)]):
    tensor._gone, getattr(tensor, "_gone_too"), name.endswith("_part"), name + "_part", f"_{name}_part"
    experimental.proxy_tensor.make_fx(run, _gone=True)
    sys.modules["torch._gone"].x = loading._utils
_HOOKS = ("_gone_hooks", "public")
torch.load = run
"""


def test_uses_are_found() -> None:
    found = {(use.name, use.replaced) for use in uses_in(SOURCE)}
    assert found == {
        ("torch.nn.Module._apply", True),
        ("torch.nn.Module._gone", True),
        ("torch._C", False),
        ("torch._C._gone", False),
        ("torch.compiler._gone", True),
        ("torch.manual_seed", True),
        ("_gone", False),
        ("_of_an_argument", False),
        ("_gone_too", False),
        ("torch.fx.experimental.proxy_tensor.make_fx(_gone)", False),
        ("torch._gone.x", True),
        ("torch.utils.data._utils", False),
        ("_gone_hooks", False),
        ("torch.load", True),
    }


def test_a_name_that_is_not_in_the_table_fails() -> None:
    found = {text.partition(": ")[2] for text in unlisted(uses_in(SOURCE), ["torch.load", "torch.compiler._gone"])}
    assert {"torch._C._gone", "_gone_too", "_gone_hooks", "torch.nn.Module._apply", "torch.manual_seed"} <= found
    assert not {"torch.load", "torch.compiler._gone", "torch.nn.Module._gone", "torch._C", "torch.utils.data._utils"} & found


def test_a_row_that_nothing_uses_fails() -> None:
    assert unused(["torch.load", "torch._C._other", "torch.Tensor._gone_too"], uses_in(SOURCE)) == ["torch._C._other"]


@pytest.mark.parametrize(
    "name",
    [
        "torch.compiler._no_such_flag_at_all",
        "torch.nn.Module._no_such_dict",
        "torchmetrics.Metric._no_such_count",
        "torch.fx.experimental.proxy_tensor.make_fx(_no_such_keyword)",
        "jax._src.no_such_module.name",
    ],
)
def test_a_name_that_is_not_there_fails(name: str) -> None:
    assert [text.partition(":")[0] for text in missing([name])] == [name]


def test_another_signature_fails() -> None:
    row = Row("torch.add_one", "counting", "adding", ("(x, step=…)",))
    assert list(changed([row], lambda _: lambda x, step=2: x + step)) == []
    assert list(changed([row], lambda _: lambda x, size=2: x + size)) == [
        "torch.add_one(x, size=…), where the table has (x, step=…): counting"
    ]
    uses = [Use("torch.load", "here", replaced=True)]
    assert list(without_signature({"torch.load": Row("torch.load", "", "", ())}, uses))
    assert signature(torch.nn.functional.one_hot) == "(tensor, num_classes=…)"  # its docstring's


def test_private_is_what_begins_with_one_underscore() -> None:
    assert (
        is_private("torch._C") and is_private("_x") and not is_private("torch.Tensor.__add__") and not is_private("tuple._fields")
    )
