"""Precisions with products in eight bits: which layers, the same numbers on a mesh and op by op, checkpoints, refusals."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import Callback, LightningModule, Trainer
from torch_compat.fabric import Fabric
from torch_compat.plugins import EightBitPrecision, Precision, TransformerEnginePrecision
from torch_compat.plugins.eight_bits import EightBitLayers
from torch_compat.strategies import MeshStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.capture.eight_bits import EightBits, eight_bit_linear

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
INT8 = EightBits(torch.int8, torch.int8, per_channel=True)


class Language(LightningModule):
    """Embedding, two linear layers, a head; 32 tokens a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(48, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.head = nn.Linear(32, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0][:, :-1]).flatten(0, 1).float(), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(outputs["loss"])


TOKENS = torch.randint(0, 48, (48, 9), generator=torch.Generator().manual_seed(0))


def fit(precision: str | Precision, strategy: Any = "auto", devices: int = 1, **options: Any) -> tuple[list[float], Language]:
    model, losses = Language(), Losses()
    chosen: dict[str, Any] = {"precision": precision} if isinstance(precision, str) else {"plugins": [precision]}
    rows = 16 // (strategy.mesh_axes(devices, 1).get("fsdp", 1) if devices > 1 else 1)
    options = {"enable_checkpointing": False, **options}
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, callbacks=[losses], **chosen, **QUIET, **options
    )
    trainer.fit(model, DataLoader(TensorDataset(TOKENS), rows))
    return [float(loss) for loss in losses.found], model


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, list[float]]:
    return {precision: fit(precision)[0] for precision in ("int8-mixed", "float8-mixed", "bf16-mixed")}


@pytest.mark.parametrize("precision", ["int8-mixed", "float8-mixed"])
def test_a_mesh_gives_what_one_device_does(precision: str, on_one_device: dict[str, list[float]]) -> None:
    rules = [("up.weight", ("tensor", "fsdp")), ("down.weight", ("fsdp", "tensor")), ("*", ("fsdp",))]
    found, _ = fit(precision, MeshStrategy({"fsdp": 4, "tensor": 2}, rules=rules), 8)
    assert found == pytest.approx(on_one_device[precision], abs=3e-3)
    assert found[-1] < found[0] - 0.2


@pytest.mark.parametrize("precision", ["int8-mixed", "float8-mixed"])
def test_op_by_op_gives_what_the_program_does(
    precision: str, on_one_device: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    assert fit(precision)[0] == pytest.approx(on_one_device[precision], abs=5e-3)


def test_the_loss_is_that_of_the_quantised_layers(on_one_device: dict[str, list[float]]) -> None:
    """And near to bfloat16's, though not the same."""
    model = Language()
    with torch.autocast("cpu", torch.bfloat16):
        x = model.embed(TOKENS[:16, :-1])
        inner = eight_bit_linear(x, model.up.weight, model.up.bias, INT8)
        inner = eight_bit_linear(nn.functional.gelu(inner), model.down.weight, None, INT8)
        logits = model.head(x + inner)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), TOKENS[:16, 1:].flatten())
    assert on_one_device["int8-mixed"][0] == pytest.approx(loss.item(), abs=1e-3)
    for precision in ("int8-mixed", "float8-mixed"):
        assert on_one_device[precision] != on_one_device["bf16-mixed"]
        assert on_one_device[precision] == pytest.approx(on_one_device["bf16-mixed"], abs=0.03)


def test_checkpoints_have_the_precision_of_the_parameters(tmp_path: Path) -> None:
    """Those of any precision can be read by any other; Transformer Engine's have the dtype of its weights, as in stock."""
    found = {}
    for name, plugin in {
        "int8": EightBitPrecision("int8-mixed"),
        "stock": TransformerEnginePrecision(weights_dtype=torch.bfloat16),
    }.items():
        fit(plugin, default_root_dir=tmp_path / name, enable_checkpointing=True, max_steps=1)
        (path,) = (tmp_path / name).rglob("*.ckpt")
        state = torch.load(path, weights_only=True)
        found[name] = {value.dtype for value in state["state_dict"].values()}
        assert {leaf.dtype for leaf in state["optimizer_states"][0]["state"][0].values() if leaf.ndim} == found[name]
    assert found == {"int8": {torch.float32}, "stock": {torch.bfloat16}}


def test_fabric_multiplies_in_eight_bits() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="int8-mixed")
    layer = nn.Sequential(nn.Linear(32, 16))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = eight_bit_linear(x, layer[0].weight, layer[0].bias, INT8).float()
    model = fabric.setup_module(layer)
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(copy.deepcopy(model)(x).detach(), expected, rtol=1e-2, atol=1e-3)
    model(x).sum().backward()
    assert layer[0].weight.grad is not None and layer[0].weight.grad.dtype == torch.float32


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.gate = nn.Linear(32, 16)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(32, 16), "gate_proj": nn.Linear(32, 16)})
        self.odd = nn.Linear(32, 20)
        self.attention = nn.MultiheadAttention(32, 2)
        self.unembed = nn.Linear(32, 64, bias=False)
        self.unembed.weight = self.embed.weight
        self.to_words = nn.Linear(32, 64, bias=False)
        self.lm_head = nn.Linear(32, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.to_words


def test_which_layers(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts()
    layers = EightBitLayers("int8-mixed", INT8)
    with caplog.at_level("INFO"):
        layers.add(parts)
    chosen = {name for name, module in parts.named_modules() if layers(module)}
    assert chosen == {"layers.0", "layers.1", "gate", "mlp.gate_proj"}
    said = caplog.text + capsys.readouterr().err
    for line in (
        "4 linear layers multiply in eight bits; not:",
        "lm_head: excluded by '*head'",
        "mlp.gate: excluded by '*.gate'",
        "to_words: the head (get_output_embeddings)",
        "unembed: its weight is an embedding's",
        "odd: 32 inputs and 20 outputs, which 8 and 16 must divide",
    ):
        assert line in said
    parts.layers.append(nn.Linear(32, 32))
    assert layers(parts.layers[2]) and not layers(nn.Linear(32, 32)), "one added later, one of no module of the run"
    mine = EightBitLayers("int8-mixed", INT8, ["layers.*"])
    mine.add(parts)
    assert mine(parts.lm_head) and not mine(parts.layers[0])
    assert not pickle.loads(pickle.dumps(mine))(parts.lm_head), "another process has its own modules"


def test_a_module_without_such_layers_is_told() -> None:
    with pytest.warns(UserWarning, match=r"no linear layer of Linear multiplies in eight bits:\n.*20 outputs"):
        EightBitLayers("int8-mixed", INT8).add(nn.Linear(32, 20))


def test_conv1d_of_transformers_is_a_linear_layer() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(16, 32)
    precision = EightBitPrecision("int8-mixed")
    precision.convert_module(layer)
    x = torch.randn(2, 3, 32)
    with precision.forward_context():
        assert torch.equal(layer(x), eight_bit_linear(x, layer.weight.mT, layer.bias, INT8))


@pytest.mark.parametrize(
    ("make", "message"),
    {
        "history": (
            lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe={"amax_history_len": 16}),
            "'amax_history_len': scales are of the tensors of this step; leave it out",
        ),
        "unknown": (
            lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe={"fp8_dpa": 1}),
            "'fp8_dpa'.*no meaning",
        ),
        "format": (
            lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe={"fp8_format": "E5M2"}),
            "'HYBRID', 'E4M3'",
        ),
        "object": (
            lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=object()),
            "expected a dict of options",
        ),  # pyright: ignore
        "layers": (
            lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16, replace_layers=False),
            "leave the argument out",
        ),
        "name": (lambda: EightBitPrecision("int4-mixed"), "takes 'int8-mixed' or 'float8-mixed'"),
        "scales": (lambda: EightBitPrecision(scales="block"), "expected 'channel' or 'tensor'"),
        "globs": (lambda: EightBitPrecision(exclude="*head"), r"a list of globs"),
    }.values(),
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises((MisconfigurationException, ValueError), match=message):
        make()


def test_options_of_a_recipe() -> None:
    recipe = {"fp8_format": "E4M3", "margin": 1, "override_linear_precision": (False, False, True)}
    made = TransformerEnginePrecision(weights_dtype=torch.float32, recipe=recipe, fallback_compute_dtype=torch.bfloat16)
    e4m3 = torch.float8_e4m3fn
    assert made.layers.how == EightBits(e4m3, e4m3, margin=1, wide=(False, False, True))
    assert made.fallback_compute_dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["transformer-engine", "transformer-engine-float16"])
def test_stocks_names(name: Any) -> None:
    plugin = Trainer(accelerator="cpu", devices=1, precision=name, enable_checkpointing=False, **QUIET).precision_plugin
    assert isinstance(plugin, TransformerEnginePrecision) and plugin.precision == "transformer-engine"
    assert plugin.weights_dtype == (torch.float16 if name.endswith("16") else torch.bfloat16)


def test_globs_may_come_from_an_iterator() -> None:
    precision, module = (
        EightBitPrecision(exclude=iter(["0"])),
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)),
    )
    precision.convert_module(module)
    assert [precision.layers(layer) for layer in module] == [False, True]
