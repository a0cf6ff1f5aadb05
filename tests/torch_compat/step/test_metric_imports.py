"""torchmetrics, which takes longer to import than torch, is imported by who uses it; also by a step, when it is captured."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests import warm

SCRIPT = """
import sys
import torch, torch_compat as pl
from torch_compat.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        from torchmetrics.functional.classification import binary_accuracy  # its checks look at values

        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("right", binary_accuracy(self.layer(batch)[:, 0], (batch[:, 0] > 0).long()))
        return loss

off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = pl.Trainer(max_steps=2, limit_val_batches=0, **off)
pl.callbacks.EarlyStopping, pl.loggers.CSVLogger
print({"torchmetrics", "transformers"} & set(sys.modules))
trainer.fit(Model())
import torchmetrics
scale = torchmetrics.functional.classification.binary_accuracy(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
print(float(scale), 0.0 <= float(trainer.callback_metrics["right"]) <= 1.0)
"""


def test_a_step_may_be_the_first_to_import_it(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = warm.run(warm.OURS, ["-c", SCRIPT], env={**os.environ, "XLATRAIN_REPORT": str(report)}, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["set()", "1.0 True"], done.stderr
    [run] = json.loads(report.read_text())["runs"]
    assert (run["executor"], run["fallback"]) == ("compiled", None)
