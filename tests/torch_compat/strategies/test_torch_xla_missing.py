"""Without torch_xla or torch_tpu: an error that says what to install, and that nobody needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_compat as pl
from torch_compat.fabric import Fabric
from torch_compat.strategies import SingleDeviceXLAStrategy, XLAFSDPStrategy, XLAStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.mark.parametrize(
    "strategy", ["torch_xla", "xla", "xla_debug", "single_xla", "xla_fsdp", XLAStrategy(), XLAFSDPStrategy()]
)
def test_torch_xla_is_named_with_what_to_install(strategy: object) -> None:
    with pytest.raises(MisconfigurationException) as error:
        pl.Trainer(strategy=strategy, devices=1, logger=False)  # pyright: ignore[reportArgumentType]
    message = str(error.value)
    assert "needs torch_xla, which is not installed" in message
    assert "pip install 'torch==2.9.1' 'torch_xla[tpu]==2.9.0'" in message
    assert "The default strategy needs none of it: leave strategy out" in message


@pytest.mark.parametrize(("package", "found", "expected"), [
    ("torch_xla", "2.1.0", "torch_xla 2.1.0 cannot be imported with torch"),
    ("torch_tpu", "0.2.0", "drives one TPU chip"),
])  # fmt: skip
def test_what_is_installed_is_read_from_its_metadata(
    package: str, found: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / f"{package}-{found}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MisconfigurationException, match=expected):
        pl.Trainer(strategy=package, devices=2, logger=False)


def test_torch_tpu_is_named_with_what_to_install() -> None:
    with pytest.raises(MisconfigurationException, match="needs torch_tpu, which is not installed: pip install torch_tpu"):
        pl.Trainer(strategy="torch_tpu", devices=1, logger=False)


def test_fabric_refuses_them() -> None:
    for strategy in ("torch_xla", "torch_tpu", XLAStrategy()):
        with pytest.raises(MisconfigurationException, match="are for the Trainer"):
            Fabric(strategy=strategy)


def test_devices_are_counted_not_chosen() -> None:
    with pytest.raises(MisconfigurationException, match=r"devices=\[1\]; expected a number of devices"):
        pl.Trainer(strategy=SingleDeviceXLAStrategy(), devices=[1], logger=False)
