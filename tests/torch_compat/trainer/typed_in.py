"""Lines typed into a prompt, as in a notebook: several runs in one process, a KeyboardInterrupt among them.

Given to ``python -``, so that ``__main__`` has no file.
"""

import json
import os
import signal

import torch_compat

torch_compat.install()
import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Tally:
    """State of the user's own, in an object of a class of ``__main__``."""

    def __init__(self):
        self.losses = []
        self.last = None


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.tally = Tally()

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.tally.losses.append(loss.detach())
        self.tally.last = 2 * loss.detach()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Outputs(pl.Callback):
    def __init__(self):
        self.losses = []
        self.doubled = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.losses.append(outputs["loss"].item())
        self.doubled.append(pl_module.tally.last.item())


class Interrupts(pl.Callback):
    seen = None

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    def on_exception(self, trainer, pl_module, exception):
        self.seen = type(exception).__name__


def trainer(**options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=8, **quiet, **options)


data = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
loader = DataLoader(data, 1)
record = {}

model = Net()
outputs = Outputs()
first = trainer(max_epochs=2, callbacks=[outputs])
record["before"] = first.validate(model, loader, verbose=False)[0]["val"]
first.fit(model, loader, loader)
record["validated"] = first.validate(model, loader, verbose=False)[0]["val"]
record["predicted"] = torch.cat(first.predict(model, loader)).square().mean().item()
record["inference"] = model.layer(data.tensors[0]).square().mean().item()
record["kinds"] = [type(p).__name__ for p in model.parameters()]

first.fit_loop.max_epochs = 3  # the same Trainer goes on
first.fit(model, loader)
record["on"] = [first.current_epoch, first.global_step]
record["tally"] = [float(loss) for loss in model.tally.losses]
record["outputs"] = outputs.losses
record["doubled"] = outputs.doubled

interrupts = Interrupts()
second = trainer(max_epochs=100, callbacks=[interrupts])
handler = signal.getsignal(signal.SIGINT)
try:
    second.fit(model, loader)
except SystemExit as end:
    record["exit"] = end.code
signal.signal(signal.SIGINT, handler)  # as a notebook does before every cell
record["interrupted"] = [interrupts.seen, second.interrupted, second.global_step, type(model.layer.weight).__name__]

third = trainer(max_epochs=1)  # the cell is run again
third.fit(model, loader)
record["again"] = [third.state.finished, third.global_step, third.world_size]
print("RECORD", json.dumps(record))
