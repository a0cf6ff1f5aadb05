"""Every axis together with every other one, on sixteen devices: unchanged models with the losses and weights of one device."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from tests import compiling, warm
from xlatrain.mesh.mesh import AXES

ON_SIXTEEN = "tests.torch_compat.strategies.on_sixteen"
MESHES = {
    "Llama": [("stage", "data", "context", "tensor"), ("data", "fsdp", "context", "tensor"), ("stage", "fsdp", "context")],
    "Mixtral": [("data", "fsdp", "expert", "tensor"), ("fsdp", "expert", "context", "tensor"), ("stage", "expert", "context")],
    "DeepseekV3": [("stage", "fsdp", "expert", "tensor")],
}
"""Family of transformers → meshes by their axes, of size 2 each."""
FOUR = ("stage", "data", "fsdp", "tensor")


def assert_as_on_one_device(family: str, meshes: list[tuple[str, ...]]) -> None:
    """Tolerances are those of the float32 in which the models take their softmax, and losses are logged."""
    axes = [json.dumps(dict.fromkeys(mesh, 2)) for mesh in meshes]
    environment = compiling.environment() | {"JAX_NUM_CPU_DEVICES": "16", "XLATRAIN_EXECUTOR": "compiled"}
    done = warm.run(warm.OURS, ["-m", ON_SIXTEEN, family, *axes], env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(meshes)
    for mesh, one in zip(meshes, found, strict=True):
        assert one["losses"] == 2 and one["loss"] < 2e-6 and one["weight"] < 1e-7, (mesh, one)


def test_stages_data_fsdp_and_tensor() -> None:
    assert_as_on_one_device("Llama", [FOUR])


@pytest.mark.slow
@pytest.mark.parametrize("family", MESHES)
def test_axes_with_experts_and_sequences(family: str) -> None:
    assert_as_on_one_device(family, MESHES[family])


def test_no_pair_of_axes_is_left_out() -> None:
    tested = {pair for meshes in (*MESHES.values(), [FOUR]) for mesh in meshes for pair in combinations(mesh, 2)}
    assert tested == set(combinations(AXES, 2))
