"""The documentation: links lead somewhere, pages that are written by tools are current, commands of tutorials run."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.environment_page import PAGE, page

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
COMMANDS = {".venv/bin/python": [sys.executable], ".venv/bin/xlatrain": [sys.executable, "-m", "xlatrain.cli"]}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (path.parent / link).exists()] == []


def tracked() -> list[str]:
    """Paths of the repository's files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in listed.stdout.split() if (ROOT / path).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_pages_name_files_variables_and_options_that_are_there() -> None:
    files = tracked()
    endings = {"/".join(path.split("/")[i:]) for path in files for i in range(path.count("/") + 1)}
    source = "\n".join(
        (ROOT / path).read_text() for path in files if path.endswith((".py", ".sh")) and not path.startswith("tests/")
    )
    wrong = []
    for page_path in PAGES:
        text = page_path.read_text()
        saved = set(re.findall(r"ave this as `([^`]+)`", text))
        prose = re.sub(r"```.*?```", "", text, flags=re.S)
        names = set(re.findall(r"`([A-Za-z0-9_][\w./-]*\.(?:py|md|toml|sh|ipynb))`", prose)) - saved
        variables = set(re.findall(r"\bXLATRAIN_[A-Z_]+\b", text))
        commands = re.findall(r"^(?:\$ )?(?:\S+/)?xlatrain .*$", text, flags=re.M)
        options = {option for line in commands for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w.-])", line)}
        wrong += [f"{page_path.name}: {name}" for name in names if name not in endings]
        wrong += [f"{page_path.name}: {name}" for name in variables | options if name not in source]
    assert wrong == []


WRITTEN_BY_TOOLS = {"bridge_ops.md", "lightning_compat_table.md", "wild.md"}


def test_cells_of_tables_are_short() -> None:
    long = []
    for path in (path for path in PAGES if path.name not in WRITTEN_BY_TOOLS and "design" not in path.parts):
        rows = re.findall(r"^\|(.*)\|$", re.sub(r"\]\([^)]*\)", "]", path.read_text()), flags=re.M)
        cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        long += [f"{path.name}: {cell[:50]}… has {len(cell)} characters" for cell in cells if len(cell) > 200]
    assert long == []


def test_every_design_note_has_its_row() -> None:
    notes = sorted(path.name for path in (ROOT / "docs/design").glob("0*.md"))
    assert re.findall(r"^\| \[\d+\]\(([^)]+)\)", (ROOT / "docs/design/index.md").read_text(), flags=re.M) == notes
    unnumbered = [name for name in notes if not (ROOT / "docs/design" / name).read_text().startswith(f"# {name[:4]}. ")]
    assert unnumbered == []


def test_the_page_of_environment_variables_is_current() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.environment_page"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # All pages and references are resolved; the theme's navigation, which warns of nothing, would take as long again.
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "dummy", str(ROOT / "docs"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def run_page(name: str, folder: Path) -> str:
    """Save the scripts of a page under the names it gives them, and run its ``$`` commands; returns what they print."""
    text = (ROOT / "docs" / name).read_text()
    scripts = re.findall(r"ave this as `([^`]+)`[^`]*```python\n(.*?)```", text, flags=re.S)
    for script, source in scripts:
        (folder / script).write_text(source)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    printed = ""
    for line in re.findall(r"^\$ (.*)$", text, flags=re.M):
        words = line.split()
        variables = dict(words.pop(0).split("=", 1) for _ in range(sum("=" in word.split("-")[0] for word in words[:1])))
        command = [*COMMANDS[words[0]], *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed += done.stdout
    return printed


@pytest.mark.slow
def test_the_first_port_runs_as_written(tmp_path: Path) -> None:
    printed = run_page("tutorials/first_port.md", tmp_path)
    assert "an ordinary module on cpu" in printed
    assert '"executor": "compiled"' in (tmp_path / "report.json").read_text()


@pytest.mark.slow
def test_the_page_of_jax_modules_runs_as_written(tmp_path: Path) -> None:
    assert "Epoch 2/2" in run_page("jax_modules.md", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the extra preflight is not installed")
def test_the_pod_tutorial_runs_as_written(tmp_path: Path) -> None:
    assert "XLATRAIN_PLAN=plan/plan.json" in run_page("tutorials/pod.md", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_port.ipynb", "pod_on_a_laptop.ipynb"])
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()


EXTENDING = """
import re, sys
import torch_compat
torch_compat.install()
for block in re.findall(r"```python\\n(.*?)```", open(sys.argv[1]).read(), flags=re.S):
    exec(compile(block, sys.argv[1], "exec"), globals())
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        return softsign(self.layer(batch)).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", softsign(self.layer(batch)).pow(2).mean())

options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
pl.Trainer(max_epochs=1, limit_train_batches=2, accelerator="cpu", devices=8, callbacks=[PrintBest()], **options).fit(Model())
"""


@pytest.mark.slow
def test_snippets_about_extending_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", EXTENDING, str(ROOT / "docs" / "extend.md")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLATRAIN_EXECUTOR": "compiled"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "best so far" in done.stdout


def test_every_option_of_the_trainer_is_explained() -> None:
    from torch_compat import Trainer

    explained = re.findall(r"^        (\w+): ", Trainer.__doc__ or "", flags=re.M)
    assert [name for name in list(inspect.signature(Trainer).parameters) if name not in explained] == []
