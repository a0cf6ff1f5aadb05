"""Models on meshes of several axes: the losses of one device, the collectives that a layer needs, and no others."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from jax.sharding import PartitionSpec
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import EMAWeightAveraging
from torch_compat.preflight.finder import find_steps
from torch_compat.shardings import COMMAND, shardings
from torch_compat.strategies import MeshStrategy
from xlatrain.preflight.hlo import Hlo
from xlatrain.xla import compiler_options as cpu_compiler

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")

TOKENS: Any = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(0))
LAYERS = 2
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")  # a fallback would be an error


class Llama(LightningModule):
    """Two layers; keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.0,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)


def trainer(devices: int, strategy: Any, **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **quiet, **arguments)


def trained(devices: int, strategy: Any, rows: int) -> Llama:
    """After two updates of two batches each, clipped by norm; the weights are their moving average."""
    module = Llama()
    averaging = EMAWeightAveraging(decay=0.5)
    one = trainer(devices, strategy, gradient_clip_val=0.25, accumulate_grad_batches=2, callbacks=[averaging])
    one.fit(module, DataLoader(TOKENS, rows))
    return module


@pytest.fixture(scope="module")
def on_one_device() -> Llama:
    return trained(1, "auto", 8)


@pytest.mark.parametrize(
    ("axes", "rows"),
    [
        pytest.param({"data": 2, "tensor": 4}, 4, id="data-tensor", marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, 1, id="fsdp", marks=pytest.mark.slow),
        pytest.param(CUBE, 2, id="all-three"),
    ],
)
def test_losses_and_weights_of_one_device(axes: dict[str, int], rows: int, on_one_device: Llama) -> None:
    """Clipping, accumulation and the moving average included. Tolerance: 2e-6 of a loss, 2e-6 of a weight."""
    module = trained(8, MeshStrategy(axes, min_size=1, remat=["model.model.layers.*"] if axes == CUBE else ()), rows)
    assert_same(module, on_one_device)


def test_columns_after_columns(on_one_device: Llama) -> None:
    """And rows after rows: by itself XLA gets the gradients of what comes before wrong (xlatrain/xla/passes/gathering.py)."""
    names = ("self_attn.*_proj", "embed_tokens", "lm_head")
    rules = {"*.mlp.*_proj.weight": PartitionSpec("tensor", "fsdp")}
    rules |= {f"*.{name}.weight": PartitionSpec("fsdp", "tensor") for name in names}
    strategy = MeshStrategy(CUBE, tensor_parallel_plan={}, min_size=1, rules=rules)
    assert_same(trained(8, strategy, 2), on_one_device)


def test_a_loss_whose_logits_are_never_whole(on_one_device: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found behind the constraints that a mesh puts on a layer's output."""
    monkeypatch.setenv("XLATRAIN_LOGITS", "1024")
    monkeypatch.setenv("XLATRAIN_REPORT", str(tmp_path / "report.json"))
    assert_same(trained(4, MeshStrategy({"fsdp": 4}, min_size=1), 2), on_one_device)
    (run,) = json.loads((tmp_path / "report.json").read_text())["runs"][-1:]
    assert run["losses"] == ["loss of 128 rows over 64 words: at most 1024 logits of a device at a time"]


def assert_same(module: Llama, expected: Llama) -> None:
    assert module.losses == pytest.approx(expected.losses, rel=2e-6)
    assert abs(module.losses[-1] - module.losses[0]) > 1e-3  # it moved
    params = dict(expected.named_parameters())
    for name, param in module.named_parameters():
        torch.testing.assert_close(param, params[name], rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def compile_step(strategy: MeshStrategy, rows: int) -> Any:
    """The compiled training step of a batch with ``rows`` rows for each part."""
    found = find_steps(trainer(8, strategy), Llama(), DataLoader(TOKENS, rows), None, None, evaluation=False)
    return found.steps[0].program.lower(*found.steps[0].args).compile()


def test_collectives_of_three_axes() -> None:
    """Parameters are gathered over fsdp, activations summed over tensor: twice a layer in each direction, no more."""
    strategy = MeshStrategy(CUBE, min_size=1)
    counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in Hlo(compile_step(strategy, 2).as_text(), strategy.mesh).collectives():
        counted[one.kind, tuple(one.axes)] += 1
    assert counted["all-gather", ("fsdp",)] >= 7 * LAYERS  # every weight of a layer
    assert counted["all-reduce", ("fsdp",)] <= 2  # gradients, all in one; not activations after each layer
    assert counted["all-gather", ("tensor",)] <= 1  # the embedding's rows: heads stay split
    assert counted["all-reduce", ("tensor",)] <= 4 * LAYERS + 4
    assert not any(kind == "collective-permute" for kind, _ in counted)  # nor are ids moved to where a lookup wants them
    # the embedding: its table, and the rows that were looked up; their gradient on the way back
    assert 0 < sum(count for (kind, _), count in counted.items() if kind == "all-to-all") <= 4


def test_lookups_and_sums_do_not_grow_with_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device looks up its own rows' worth: what is looked up of the whole batch is an eighth of the features.

    And the gradients of a large model are summed one by one: in one collective they would all be whole at once.
    """
    monkeypatch.setattr(cpu_compiler, "LARGE", 1)
    strategy = MeshStrategy({"fsdp": 8}, min_size=1)
    text = compile_step(strategy, 4).as_text()
    assert Counter(one.kind for one in Hlo(text, strategy.mesh).collectives())["all-reduce"] >= 7 * LAYERS
    rows, length, hidden = 8 * 4, 16, 32
    assert f"f32[{rows},{length},{hidden // 8}]" in text
    assert f"f32[{rows},{length},{hidden}]" not in text


def test_remat_takes_less_memory() -> None:
    def temporaries(remat: list[str]) -> int:
        return compile_step(MeshStrategy({"data": 8}, remat=remat), 4).memory_analysis().temp_size_in_bytes

    assert temporaries(["model.model.layers.*"]) < temporaries([])


def test_plans_given_by_the_user() -> None:
    plan = {"model.model.layers.*.mlp.up_proj": ColwiseParallel(), "model.model.layers.*.mlp.down_proj": RowwiseParallel()}
    table = shardings(
        trainer(8, MeshStrategy({"data": 2, "tensor": 4}, tensor_parallel_plan=plan)), Llama(), DataLoader(TOKENS, 4)
    )
    split = {place.path: tuple(place.spec) for place in table.places if place.role == "parameter" and any(place.spec)}
    layers = range(LAYERS)
    assert split == {f"model.model.layers.{i}.mlp.up_proj.weight": ("tensor",) for i in layers} | {
        f"model.model.layers.{i}.mlp.down_proj.weight": (None, "tensor") for i in layers
    }
    wrong = {
        "model.layers.*.mlp.up": "colwise",
        "model.model.layers.*.mlp.act_fn": "colwise",
        "model.lm_head": PrepareModuleInput(input_layouts=(None,), desired_input_layouts=(None,)),
    }
    with pytest.raises(
        ValueError, match=r"'model.layers.\*.mlp.up' matches no .*; .*act_fn' has no parameters .*'PrepareModuleInput': unknown"
    ):
        shardings(trainer(8, MeshStrategy({"tensor": 8}, tensor_parallel_plan=wrong)), Llama(), DataLoader(TOKENS, 4))


def test_what_matches_nothing_is_said() -> None:

    strategy = MeshStrategy({"fsdp": 4, "expert": 2}, rules={"*.query.weight": PartitionSpec("fsdp")}, tensor_parallel_plan={})
    said = r"'\*.query.weight' → .* matches no parameter; mesh axis 'expert' .* holds them all\. Add.*no axis 'tensor'"
    with pytest.warns(UserWarning, match=said):
        shardings(trainer(8, strategy), Llama(), DataLoader(TOKENS, 4))
    with pytest.raises(ValueError, match=r"remat pattern 'model.layer.\*' matches no module of Llama"):
        find_steps(trainer(8, MeshStrategy(remat=["model.layer.*"])), Llama(), DataLoader(TOKENS, 1), None, None)


SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch_compat.strategies import MeshStrategy

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 512)

    def training_step(self, batch, batch_idx):
        return self.up(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = Trainer(accelerator="cpu", devices=8, max_epochs=1, strategy=MeshStrategy({"fsdp": 4, "tensor": 2}), logger=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 64)))
raise AssertionError("the script runs up to fit")
"""


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert COMMAND.main(["--strict", "--output", str(tmp_path / "table.svg"), str(script)]) == 1  # tensor splits nothing
    assert "mesh fsdp=4 × tensor=2: 8 devices" in printed.getvalue()
    assert "warning: mesh axis 'tensor' of size 2 splits no parameter" in printed.getvalue()
    assert (tmp_path / "table.svg").read_text().startswith("<svg")
    assert COMMAND.main(["--output", "table.png", str(script)]) == 2
