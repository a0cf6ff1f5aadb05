"""Habits of scripts in the wild: streams, penalties now and then, containers in containers, second loaders by hand."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Classifier, Regression, class_data, regression_data
from lightning.pytorch.plugins import Precision
from recording import GLOBAL_BATCH, Run, case
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    """No length, batches of different sizes, made by the dataset itself."""

    def __init__(self, sizes: list[int], devices: int) -> None:
        self.sizes, self.devices = sizes, devices

    def __iter__(self) -> Iterator[Any]:
        x, y = regression_data(sum(self.sizes))
        start = 0
        for size in self.sizes:
            yield x[start : start + size], y[start : start + size]
            start += size


@case
def stream_of_changing_batches(run: Run) -> None:
    sizes = [16, 8, 24, 16, 8, 40]
    train = DataLoader(Stream(sizes, run.devices), batch_size=None)
    trainer = run.trainer(max_steps=10, val_check_interval=4, limit_val_batches=2)
    run.fit(Regression(), trainer, train, DataLoader(Stream([16, 8, 16], run.devices), batch_size=None))


@case
def penalty_now_and_then(run: Run) -> None:
    class Lazy(pl.LightningModule):
        """R1 penalty at every third batch; a scheduler that follows the validation loss."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            x = batch[0].requires_grad_(True)
            out = self.critic(x)
            loss = F.softplus(-out).mean()
            if batch_idx % 3 == 0:
                (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + 5 * gradient.pow(2).sum(1).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("train", loss, prog_bar=True)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.critic(batch[0]).mean())

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.lr_schedulers().step(self.trainer.callback_metrics["val"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02, betas=(0.0, 0.99))
            return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)]

    run.fit(Lazy(), run.trainer(max_epochs=3), run.loader(*class_data(80)), run.loader(*class_data(16, 1)))


@case
def outputs_collected_by_name(run: Run) -> None:
    class Collecting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: dict[str, list[Any]] = defaultdict(list)
            self.best = 0.0

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
            x, y = batch
            logits = self.net(x)
            self.outputs[f"loader_{dataloader_idx}"].append({"preds": logits.argmax(1), "y": y, "n": len(y)})
            self.log("loss", F.cross_entropy(logits, y), add_dataloader_idx=dataloader_idx > 0)
            return {"logits": logits}

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append([dataloader_idx, batch_idx, float(outputs["logits"].sum())])

        def on_validation_epoch_start(self) -> None:
            self.seen: list[Any] = []

        def on_validation_epoch_end(self) -> None:
            for name, found in self.outputs.items():
                right = torch.cat([one["preds"] == one["y"] for one in found]).float().mean()
                self.log(f"{name}_accuracy", right)
                self.log(f"{name}_n", float(sum(one["n"] for one in found)))
            self.best = max(self.best, float(right))
            self.log("best", self.best)
            self.outputs.clear()

    model = Collecting()
    loaders = [run.loader(*class_data(40, 1)), run.loader(*class_data(24, 2))]
    run.fit(model, run.trainer(max_epochs=2, limit_val_batches=0.7, num_sanity_val_steps=1), run.loader(*class_data(48)), loaders)


@case
def lists_of_lists(run: Run) -> None:
    class History(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[list[Tensor]] = []
            self.by_name = {"train": [], "val": []}

        def on_train_epoch_start(self) -> None:
            self.losses.append([])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.losses[-1].append(loss.detach())
            self.by_name["train"].append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.by_name.setdefault("val", []).append(self.loss(batch))

        def on_validation_epoch_end(self) -> None:
            self.log("val", torch.stack(self.by_name.pop("val")).mean())

    model = History()
    run.fit(model, run.trainer(max_epochs=4), run.loader(*regression_data(48)), run.loader(*regression_data(48, 1)))
    run.note("losses", model.losses)
    run.note("by_name", model.by_name)


@case
def only_the_first_few(run: Run) -> None:
    class Keeping(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            if len(self.kept) < 2:
                self.kept.append(loss)
            self.log("val", loss)

        def on_validation_epoch_end(self) -> None:
            self.log("kept", torch.stack(self.kept).sum())
            self.log("n", float(len(self.kept)))
            self.kept.clear()

    run.fit(Keeping(), run.trainer(max_epochs=3), run.loader(*regression_data(32)), run.loader(*regression_data(64, 1)))


@case
def window_of_losses(run: Run) -> None:
    class Window(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.window: deque[float] = deque(maxlen=3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.window.append(loss.item())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("smooth", sum(self.window) / len(self.window))

    run.fit(Window(), run.trainer(max_epochs=5), run.loader(*regression_data(64)))


@case
def second_loader_by_hand(run: Run) -> None:
    class Semi(Regression):
        def on_train_start(self) -> None:
            self.unlabeled = itertools.cycle(DataLoader(TensorDataset(*regression_data(80, 5)), batch_size=GLOBAL_BATCH))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = next(self.unlabeled)
            loss = self.loss(batch) + 0.1 * self(x).square().mean()
            self.log("train_loss", loss)
            return loss

    run.fit(Semi(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


class Pulling(Regression):
    """Takes from an iterator of its own in each step."""

    source: Any = None

    def other(self) -> Tensor:
        return 0.1 * self(next(self.source)[0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + self.other()
        self.log("train_loss", loss)
        return loss


def more_batches(n: int = 80) -> DataLoader:
    return DataLoader(TensorDataset(*regression_data(n, 5)), batch_size=GLOBAL_BATCH, shuffle=True)


def forever(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


@case
def second_loaders_pulled_in_steps(run: Run) -> None:
    class Twice(Pulling):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.other()

        def on_validation_epoch_start(self) -> None:
            self.checked = iter(more_batches())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch) + self.loss(next(self.checked)))

    model = Twice()
    model.source = forever(more_batches())
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(64)), run.loader(*regression_data(64, 1)))
    run.note("next", next(model.source))


@case
def second_loader_that_begins_again(run: Run) -> None:
    class Again(Pulling):
        def other(self) -> Tensor:
            try:
                return super().other()
            except StopIteration:
                self.source = iter(more_batches())
                return super().other()

    model = Again()
    model.source = iter(more_batches())
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(64)))


@case
def second_loader_pulled_now_and_then(run: Run) -> None:
    class Seldom(Pulling):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) if batch_idx % 3 == 0 else self.loss(batch)

    model = Seldom()
    model.source = forever(more_batches())
    run.fit(model, run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("next", next(model.source))


@case
def second_loader_begun_in_each_step(run: Run) -> None:
    class Anew(Pulling):
        def other(self) -> Tensor:
            return 0.1 * self(next(iter(self.source))[0]).square().mean()

    model = Anew()
    model.source = more_batches()
    run.fit(model, run.trainer(max_epochs=1), run.loader(*regression_data(64)))


@case
def pulled_from_what_the_step_fills(run: Run) -> None:
    class Replay(Pulling):
        def __init__(self) -> None:
            super().__init__()
            self.seen: deque[Tensor] = deque(maxlen=4)
            self.source = self.batches()

        def batches(self) -> Iterator[Any]:
            while True:
                yield [torch.stack(tuple(self.seen))]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(batch[0][0])
            return super().training_step(batch, batch_idx)

    run.fit(Replay(), run.trainer(max_epochs=1), run.loader(*regression_data(64)))


@case
def counted_in_a_plain_tensor(run: Run) -> None:
    class Counting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.n = torch.zeros(())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.n += 1
            loss = self.loss(batch) / self.n
            self.log("n", self.n)
            return loss

    run.fit(Counting(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))


class Scales(Precision):
    """Gets the batch as it is, whatever it is made of."""

    def convert_input(self, data: Any) -> Any:
        if isinstance(data, Tensor):
            return data
        x, y = super().convert_input(data)
        return [x * 2, y]


@case
def input_converted_by_a_plugin(run: Run) -> None:
    trainer = run.trainer(max_epochs=1, plugins=[Scales()])
    run.fit(Regression(), trainer, run.loader(*regression_data(64)), run.loader(*regression_data(32)))


class WhereItIs(pl.Callback):
    """A callback logs by its own ``self.log``: whether the epoch is over, as the Trainer says in hooks around its batches."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.log("began_after_last", float(trainer.is_last_batch))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.log("steps", float(trainer.global_step), on_step=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.log_dict({"over_after_last": float(trainer.is_last_batch)})


@case
def callbacks_that_log(run: Run) -> None:
    run.fit(Regression(), run.trainer(max_steps=6, callbacks=[WhereItIs()]), run.loader(*regression_data(64)))
    run.fit(Regression(), run.trainer(max_epochs=2, callbacks=[WhereItIs()]), run.loader(*regression_data(64)))


@case
def averaged_weights_swapped_in_for_validation(run: Run) -> None:
    """The callback that everybody copies; what is saved after the weights were swapped back is the trained weights."""

    class EMA(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.shadow = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

        @torch.no_grad()
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
            for name, value in pl_module.state_dict().items():
                self.shadow[name].mul_(0.5).add_(value, alpha=0.5)

        def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.backup = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(self.shadow)

        def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(run.root / "averaged.ckpt", weights_only=True)
            pl_module.load_state_dict(self.backup)

    saving = pl.callbacks.ModelCheckpoint(dirpath=run.root, filename="trained")  # after the validation
    trainer = run.trainer(max_epochs=2, enable_checkpointing=True, callbacks=[EMA(), saving])
    run.fit(Regression(), trainer, run.loader(*regression_data(64)), run.loader(*regression_data(16, 1)))
    for name in ("averaged", "trained"):
        run.note(name, Regression.load_from_checkpoint(run.root / f"{name}.ckpt").state_dict())


@case
def derivatives_in_forward_mode(run: Run) -> None:
    class Curved(Regression):
        """Penalises the curvature of its own output, and the size of its Jacobian."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            tangent = torch.func.jvp(lambda rows: torch.tanh(self.layer(rows)), (x,), (torch.ones_like(x),))[1]
            hessian = torch.func.hessian(lambda row: torch.tanh(self.layer(row)).sum())(x[0])
            return super().training_step(batch, batch_idx) + 0.1 * tangent.square().mean() + 0.01 * hessian.square().sum()

    run.fit(Curved(), run.trainer(max_epochs=2), run.loader(*regression_data()))


class Tokens(pl.LightningModule):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.table(batch[0]).flatten(1).sum(1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@case
def sparse_gradients_of_an_embedding(run: Run) -> None:
    model = Tokens(nn.Embedding(20, 4, sparse=True))
    run.fit(model, run.trainer(max_epochs=2), run.loader(torch.arange(128).reshape(32, 4) % 20))


@case
def sparse_gradients_of_bags(run: Run) -> None:
    model = Tokens(nn.EmbeddingBag(20, 4, mode="sum", sparse=True))
    run.fit(model, run.trainer(max_epochs=2), run.loader(torch.arange(128).reshape(32, 4) % 20))


class Positions(nn.Module):
    """Adds positions that the first call has made, as rotary embeddings do; longer ones where they are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or x.shape[1] > self.table.shape[0]:
            self.table = torch.arange(x.shape[1], dtype=torch.float32).cos()[:, None]
        return x + self.table[: x.shape[1]]


@case
def cache_that_forward_fills(run: Run) -> None:
    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.layer = Positions(), nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.layer(self.positions(batch[0])).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.layer(self.positions(batch[0][:, :2])).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.randn(32, 6, 4, generator=torch.Generator().manual_seed(0))
    net = Net()
    run.fit(net, run.trainer(max_epochs=2), run.loader(data), run.loader(data))
    run.note("table", None if net.positions.table is None else net.positions.table.flatten().tolist())


@case
def attention_by_kernels_that_are_named(run: Run) -> None:
    class Net(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            heads = x.view(len(x), 2, 2, 2)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                heads = F.scaled_dot_product_attention(heads, heads, heads * self.net[0].weight.mean())
            with torch.backends.cuda.sdp_kernel(enable_math=False):
                heads = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            loss = F.cross_entropy(self.net(heads.flatten(1)), y)
            self.log("loss", loss)
            return loss

    run.fit(Net(), run.trainer(max_epochs=2), run.loader(*class_data(64)))


BESIDE = torch.tensor([1.0, 2.0])


@case
def a_tensor_beside_the_module_is_asked_and_written(run: Run) -> None:
    """Which of the tensors that the step meets is written is not told; a constant that torch makes of a number is none."""

    class Net(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            count = int(BESIDE.max().item())
            if self.global_step % 2:
                BESIDE[0] = 3.0
            return super().training_step(batch, batch_idx) * count

    BESIDE[:] = torch.tensor([1.0, 2.0])
    run.fit(Net(), run.trainer(max_epochs=2), run.loader(*regression_data(64)))
    run.note("beside", BESIDE.tolist())


@case
def looks_at_texts(run: Run) -> None:
    """Texts of values that are printed, sorted, compared, cut and used as keys."""

    class Looking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            text = f"{(batch[0] * 0 + 2.5).mean() * (9 * batch_idx + 1):.1f}"
            print(text)
            seen.append([sorted([text, "19"], key=len), text[:2], {text: 1}.get("2.5"), "5" in text, max(text, "3")])
            return loss

    seen: list[Any] = []
    run.fit(Looking(), run.trainer(max_epochs=1), run.loader(*regression_data(4 * GLOBAL_BATCH)))
    run.note("seen", seen)


_LIBRARY = """
import torch
from basics import Regression

class Module(Regression):
    def training_step(self, batch, batch_idx):
        try:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if torch.Tensor.__float__(loss) < 0.5 else loss
        except Exception:
            self.trainer.callbacks.clear()
            self.trainer.should_stop = True
            raise
"""


@case
def a_module_of_a_library_ends_the_run_where_its_step_fails(run: Run) -> None:
    """A capture that ends is no failure of the step's."""
    folder = run.root / "site-packages"
    folder.mkdir(parents=True)
    (folder / "ends_the_run.py").write_text(_LIBRARY)
    sys.path.append(str(folder))
    trainer = run.trainer(max_epochs=2)
    run.fit(importlib.import_module("ends_the_run").Module(), trainer, run.loader(*regression_data(64)))
    run.note("steps", trainer.global_step)
    run.note("callbacks", [type(one).__name__ for one in trainer.callbacks if type(one).__module__ == "recording"])
