"""The dependency rules of the design: who may import whom, and that importing starts nothing."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchmetrics", "torchax", "torch_xla", "torch_compat"}
STOCK_LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """(module, line) of every import in a file, wherever it stands."""
    return list(imported(ast.walk(ast.parse(path.read_text())), package_of(path)))


def is_bridge(path: Path) -> bool:
    return path.relative_to(ROOT).parts[:2] == ("xlatrain", "bridge")


def package_of(path: Path) -> list[str]:
    """The package that relative imports in ``path`` count from."""
    return list(path.relative_to(ROOT).parts[:-1])


def imported(nodes: Iterator[ast.AST], package: list[str]) -> Iterator[tuple[str, int]]:
    """(module, line) of every import statement; ``from a import b`` gives ``a.b``, relative names are resolved."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, *([node.module] if node.module else [])]
            yield from ((".".join([*prefix, alias.name]), node.lineno) for alias in node.names)


def offences(paths: list[Path], forbidden: set[str]) -> list[str]:
    """Each import, anywhere in the files, of a module whose name is in ``forbidden`` or below one of them."""
    found = []
    for path in paths:
        for name, line in imports_of(path):
            if any(name == module or name.startswith(module + ".") for module in forbidden):
                found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


def test_only_the_bridge_imports_torch() -> None:
    """And the reader of torchrun's store, in a function that only a process of torchrun's agent calls."""
    torchrun = ROOT / "xlatrain" / "cluster" / "distributed" / "torchrun.py"
    paths = [path for path in sources("xlatrain") if not is_bridge(path)]
    assert offences([path for path in paths if path != torchrun], TORCH_FAMILY | {"xlatrain.bridge"}) == []
    on_load = imported(imports_on_load(ast.parse(torchrun.read_text())), package_of(torchrun))
    assert not [name for name, _ in on_load if name.split(".")[0] in TORCH_FAMILY]


def test_xlatrain_never_imports_the_facade() -> None:
    assert offences(sources("xlatrain"), {"torch_compat"}) == []


@pytest.mark.parametrize("package", ["xlatrain", "torch_compat"])
def test_stock_lightning_is_never_imported(package: str) -> None:
    """But for the one package that is a strategy of its own Trainer."""
    beside = ROOT / "torch_compat" / "stock_trainer"
    assert offences([path for path in sources(package) if beside not in path.parents], STOCK_LIGHTNING) == []


def test_only_the_name_of_the_strategy_for_stock_lightning_is_in_the_engine() -> None:
    assert import_in_fresh_process(["xlatrain.lightning"]) == ""
    users = [path for path in sources("torch_compat") if offences([path], {"torch_compat.stock_trainer"})]
    assert {path.parent.name for path in users} == {"stock_trainer"}


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether it is ``if TYPE_CHECKING``."""
    return isinstance(node, ast.If) and any(
        "TYPE_CHECKING" in (getattr(one, "id", None), getattr(one, "attr", None)) for one in ast.walk(node.test)
    )


def imports_on_load(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that run when the module is loaded: not in functions, not under ``if TYPE_CHECKING``."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if is_for_types(node):
            todo.extend(node.orelse)
            continue
        yield node
        todo.extend(ast.iter_child_nodes(node))


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Our modules → our modules that they import when they are loaded."""
    paths = {module_name(path): path for package in ("xlatrain", "torch_compat") for path in sources(package)}
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        for target, _ in imported(imports_on_load(ast.parse(path.read_text())), package_of(path)):
            parent = target.rpartition(".")[0]
            found = target if target in paths else parent if parent in paths else None
            # A package's __init__ that imports its own submodules, and they each other, is no cycle between nouns.
            if found is not None and found != name and not name.startswith(found + "."):
                graph[name].add(found)
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of the graph as a list of its nodes, or an empty list."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        iterators: list[Iterator[str]] = []
        if start not in done:
            path, iterators = [start], [iter(graph[start])]
        while iterators:
            step = next(iterators[-1], None)
            if step is None:
                done.add(path.pop())
                iterators.pop()
            elif step in path:
                return [*path[path.index(step) :], step]
            elif step not in done:
                path.append(step)
                iterators.append(iter(graph[step]))
    return []


def test_find_cycle_finds_one() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_import_cycles() -> None:
    assert find_cycle(import_graph()) == []


LAYERS = (
    *(
        "utilities stock_names install",
        "accelerators checkpoint",
        "core",
        "plugins",
        "loggers",
        "callbacks profilers",
        "run",
        "step",
    ),
    *("device_backends", "strategies", "trainer loops", "tuner fabric preflight serve legacy stock_trainer"),
    "cli demos overrides shardings explain doctor",
)
"""The packages of the facade, lowest first: each may import those of its own line and of the lines above it."""


def facade_graph() -> dict[str, set[str]]:
    """Packages of the facade → those that they import when they are loaded, one of their files each."""
    graph: dict[str, set[str]] = {}
    for name, targets in import_graph().items():
        package, *rest = name.split(".")
        if package == "torch_compat" and rest and rest != ["__main__"]:
            others = {target.split(".")[1] for target in targets if target.startswith("torch_compat.")}
            graph.setdefault(rest[0], set()).update(others - {rest[0], "__main__"})
    return graph


def test_packages_of_the_facade_form_layers() -> None:
    level = {name: i for i, names in enumerate(LAYERS) for name in names.split()}
    graph = facade_graph()
    assert graph.keys() == level.keys()
    assert "\n".join(LAYERS) in (ROOT / "docs" / "architecture.md").read_text()
    upward = [f"{name} imports {one}" for name, others in graph.items() for one in others if level[one] > level[name]]
    assert upward == []
    assert find_cycle(graph) == []


FOLDERS = {
    "torch_compat.step": (
        *(
            "attended gradients host_gradients kept_graphs materialize planned recompilation values",
            "host",
            "metrics model_gradients placed_batch",
            "effects",
        ),
        *("guards", "optimizers", "capture carried model_state", "buckets step_programs"),
        *("index_looks outcome placed_optimizers program_cache programs", "kept_steps", "mesh_run", "run_context step_runner"),
        *("batch_pass circumstances compile_notice device_memory mesh_state step_services update", "program_builder"),
        *("mesh_steps", "eager mesh_step_runner", "placed_run way_back", "optimization", "dispatcher"),
    ),
    "xlatrain.bridge": (
        *(
            "capturing converted_names errors fake_kernels gradients patches tensor_parallel",
            "inference_mode parallelize random tensors torchscript",
        ),
        *("graph_nodes host_draws jax_function jax_value pretrained", "loops", "capture", "lower"),
        *("lazy_init torch_function", "nnx_module"),
    ),
}
"""The order of what is in the two largest packages, lowest first: each line imports the lines above it and nothing of its own."""


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_import_those_above_them_only(package: str) -> None:
    """However they do it: at load, in a function, or for a type."""
    level = {name: i for i, names in enumerate(FOLDERS[package]) for name in names.split()}
    folder = ROOT.joinpath(*package.split("."))
    assert level.keys() == {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()} - NO_NOUNS
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).parts[0].removesuffix(".py")
        for target, line in imports_of(path):
            other = target.removeprefix(f"{package}.").split(".")[0] if target.startswith(f"{package}.") else name
            if name in level and other in level and other != name and level[other] >= level[name]:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert found == []


NO_NOUNS = {"__init__", "__pycache__"}

CEILINGS = {"deferred": 7, "type-only": 45}
"""How many arrows may lead up the facade's layers: imports in a function, and for a type. They only fall."""


@functools.cache
def upward_arrows() -> dict[str, list[str]]:
    """The ``deferred`` and ``type-only`` imports of a package of the facade from one that stands above it."""
    level = {name: i for i, names in enumerate(LAYERS) for name in names.split()}
    found: dict[str, list[str]] = {kind: [] for kind in CEILINGS}
    for path in sources("torch_compat"):
        own = level.get(".".join(module_name(path).split(".")[1:2]), len(level))
        tree = ast.parse(path.read_text())
        on_load = {id(node) for node in imports_on_load(tree)}
        guarded = [node for node in ast.walk(tree) if is_for_types(node)]
        for_types = {id(node) for one in guarded for node in ast.walk(one)}
        for node in ast.walk(tree):
            if id(node) in on_load:
                continue
            for target, line in imported(iter([node]), package_of(path)):
                package, _, rest = target.partition(".")
                if package == "torch_compat" and level.get(rest.split(".")[0], -1) > own:
                    kind = "type-only" if id(node) in for_types else "deferred"
                    found[kind].append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    return found


@pytest.mark.parametrize("kind", CEILINGS)
def test_arrows_up_the_layers_only_fall(kind: str) -> None:
    found, ceiling = upward_arrows()[kind], CEILINGS[kind]
    listed = "\n".join(found)
    assert len(found) <= ceiling, f"a new {kind} import of a package above: import downwards, or ask for a protocol:\n{listed}"
    assert len(found) == ceiling, f"only {len(found)} {kind} imports lead up by now: lower CEILINGS[{kind!r}] to that"


def test_steps_know_no_trainer() -> None:
    """They see a run through the protocols of ``step/run_context.py``."""
    arrows = [one for found in upward_arrows().values() for one in found]
    assert [one for one in arrows if one.startswith("torch_compat/step/")] == []


IMPORT_ALL = """
import importlib, logging, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "jax" in sys.modules:
        from jax._src import xla_bridge
        assert not xla_bridge._backends, f"importing {name} started a JAX backend"
    assert not logging.root.handlers, f"importing {name} took the root logger from the application"
print(*sorted({"torch", "flax"} & set(sys.modules)))
"""


def test_the_facade_logs_under_lightnings_names() -> None:
    """So that its INFO records are shown and ``getLogger("lightning.pytorch").setLevel(…)`` silences them."""
    assert [path.name for path in sources("torch_compat") if "getLogger(__name__)" in path.read_text()] == []


def import_in_fresh_process(names: list[str]) -> str:
    """Imports the modules one after the other; gives those of flax and torch that were loaded by it."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def importable(package: str) -> list[str]:
    return [module_name(path) for path in sources(package) if path.name != "__main__.py"]


def test_importing_the_engine_starts_no_backend_and_loads_no_torch() -> None:
    names = [name for name in importable("xlatrain") if not name.startswith("xlatrain.bridge")]
    assert import_in_fresh_process(names) == "flax"


def test_importing_the_bridge_and_the_facade_starts_no_backend() -> None:
    names = [name for name in importable("xlatrain") if name.startswith("xlatrain.bridge")] + importable("torch_compat")
    assert import_in_fresh_process(names) == "flax torch"


def test_who_has_no_nnx_module_does_not_wait_for_flax() -> None:
    assert import_in_fresh_process(["torch_compat.trainer.trainer", "torch_compat.fabric.fabric"]) == "torch"
