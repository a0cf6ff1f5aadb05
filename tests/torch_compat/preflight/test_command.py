"""``xlatrain preflight`` as a user runs it: an unchanged Lightning script, in a process of its own, two at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Large(pl.LightningModule):
    def __init__(self, width: int = 64, rate: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.width == width and self.hparams.rate == rate
        self.net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)


if __name__ == "__main__":
    width = int(sys.argv[1])
    module = Large(width, rate=3e-4)
    loader = DataLoader(TensorDataset(torch.zeros(1, width).expand(5000, width)), batch_size=4)
    data = pl.LightningDataModule()
    data.train_dataloader = lambda: loader
    pl.Trainer(strategy="fsdp", accelerator="auto", devices=1, max_epochs=1).fit(module, data)
    raise SystemExit("fit came back")
"""


class Page(HTMLParser):
    """Every element is closed, nothing is loaded from elsewhere, and there is a verdict."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.verdict = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & dict(attrs).keys() and tag != "script"
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["h1", "span"]:
            self.verdict += data


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``xlatrain preflight``; what still runs when the test ends is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(script: Path, *arguments: str, width: int = 64) -> subprocess.Popen[str]:
        started.append(_start(script, *arguments, width=width))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _start(script: Path, *arguments: str, width: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_", "ALLOW_MULTIPLE"))}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(script.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "xlatrain.cli", "preflight", *arguments, str(script), str(width)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=script.parent
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_two_at_once_of_an_unchanged_script(start: Start, script: Path, tmp_path: Path) -> None:
    """Two runs at once: one has 8.6 GB of state and takes no memory for it; neither prints more than its words and a warning."""
    small = start(script, "--topology", "v5e:2x2", "--num-slices", "2", "--output", str(tmp_path / "small"))
    large = start(script, "--topology", "v5p:2x2x1", "--json", "--no-suggestions", width=1 << 14)
    out, err = small.communicate(timeout=300)
    assert small.returncode == 0, err
    assert out.startswith("FITS   2 × v5e:2x2, 8 chips, mesh data 1 × fsdp 8")
    told = [line for line in err.splitlines() if line.startswith("xlatrain preflight: ")]
    first = next(index for index, line in enumerate(told) if "first estimate per chip: " in line)
    assert "activations come on top" in told[first] and told[first + 1].endswith("tracing the steps")
    rest = [line for line in err.splitlines() if not line.startswith(("xlatrain preflight: ", "Loading `train_dataloader`"))]
    (warning,) = rest
    assert "mesh axis 'fsdp' of size 8 goes over several TPU slices" in warning
    found = json.loads((tmp_path / "small" / "preflight.json").read_text())
    required = {
        "fits",
        "topology",
        "chips",
        "parameters",
        "bytes_per_chip",
        "collectives",
        "flops_per_step",
        "estimate",
        "seconds",
    }
    assert required <= found.keys() and "dcn" in found["collectives"]
    parts = found["bytes_per_chip"]
    named = ("parameters", "gradients", "optimizer", "batch", "temporaries")
    assert parts["total"] == sum(parts[part] for part in named) < parts["hbm"]
    assert not list(tmp_path.glob("lightning_logs*")) and not list(tmp_path.glob("checkpoints*"))
    page = Page((tmp_path / "small" / "preflight.html").read_text())
    assert (
        page.verdict == "fits" and page.seen.count("svg") == 3 and not [tag for tag in page.open if tag not in ("html", "body")]
    )
    out, err = large.communicate(timeout=300)
    assert large.returncode == 0, err
    found = json.loads(out)
    assert found["chips"] == 4 and found["parameters"] == 2 * (1 << 28) + 2 * (1 << 14)
    assert found["peak_memory"] < 2 * 2**30
    assert not list((tmp_path / "programs").glob("*-cache")), "JAX warns in the next process that it cannot load a TPU's program"


def test_what_cannot_be_examined(start: Start, script: Path, tmp_path: Path) -> None:
    wrong = start(script, "--topology", "v5e:4x5")
    limited = start(script, "--topology", "cpu:8", "--timeout", "0.2")
    script_without_fit = tmp_path / "empty.py"
    script_without_fit.write_text("print('nothing')")
    empty = start(script_without_fit, "--topology", "cpu:2")
    out, err = wrong.communicate(timeout=300)
    assert (wrong.returncode, out) == (2, "") and "near: v5e:4x4" in err
    _, err = limited.communicate(timeout=300)
    assert limited.returncode == 124 and err.endswith("stopped after the time limit of 0.2 s (--timeout)\n")
    out, err = empty.communicate(timeout=300)
    assert empty.returncode == 2 and "without calling trainer.fit" in err
