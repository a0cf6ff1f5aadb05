"""Run by test_single_device.py in a process of its own, since SPMD cannot be switched off again: training on one device."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

from tests.torch_xla.training import difference, loader, make, plain_training, trainer
from torch_compat.strategies import SingleDeviceXLAStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


def message(*args: Any, **kwargs: Any) -> str:
    """The error of a Trainer that cannot be made."""
    try:
        trainer(*args, **kwargs)
    except MisconfigurationException as error:
        return str(error)
    return "no error"


def main() -> None:
    torch_xla.device()  # before a backward pass on the host
    reference = make()
    expected = plain_training(reference, clip=0.5)
    found: dict[str, Any] = {"count": message("torch_xla", 3), "platform": message("torch_xla", 4, accelerator="tpu")}
    module = make()
    first = next(module.parameters())
    run = trainer("torch_xla", 1, gradient_clip_val=0.5)
    run.fit(module, loader(1))
    found["losses"] = [module.values(), expected]
    found["difference"] = difference(module, reference)
    found["identity"] = next(module.parameters()) is first
    found["devices"] = [module.device.type, first.device.type]
    predicted = torch.cat(trainer(SingleDeviceXLAStrategy(), 1).predict(module, loader(1)))  # pyright: ignore[reportArgumentType]
    reference.eval()
    whole = reference(torch.cat([x for x, _ in loader(1)]))
    found["predicted"] = float((predicted - whole).abs().max())
    found["spmd"] = xr.is_spmd()
    found["later"] = message("torch_xla", 4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
