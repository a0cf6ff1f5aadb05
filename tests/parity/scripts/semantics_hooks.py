"""Hooks inside a step, what cannot be compiled, and the module after a run."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from basics import Regression, regression_data
from recording import Run, case
from semantics_models import Deep, fit
from torch import Tensor, nn

# -- hooks -----------------------------------------------------------------------------------------------------------------


def gradients_of(model: pl.LightningModule) -> list[Any]:
    return [None if p.grad is None else p.grad.norm().item() for p in model.parameters()]


@case
def gradients_seen_and_changed_with_accumulation(run: Run) -> None:
    class Watching(Deep):
        def on_before_backward(self, loss: Tensor) -> None:
            seen.append(["backward", loss.item()])

        def on_after_backward(self) -> None:
            seen.append(["after", *gradients_of(self)])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.layer.parameters():
                parameter.grad.mul_(0.5)
            self.log("norm", self.layer.weight.grad.norm())
            seen.append(["step", *gradients_of(self)])

        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append(["zero", self.global_step])

    seen: list[Any] = []
    fit(run, Watching(), n=112, accumulate_grad_batches=2, gradient_clip_val=0.3)
    run.note("seen", seen)


@case
def clipped_by_the_module(run: Run) -> None:
    class Clipping(Regression):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
            given.append([gradient_clip_val, gradient_clip_algorithm])
            self.clip_gradients(optimizer, gradient_clip_val=0.1 * (1 + self.current_epoch), gradient_clip_algorithm="norm")

    given: list[Any] = []
    fit(run, Clipping())
    run.note("given", given)


@case
def optimizer_step_with_warm_up(run: Run) -> None:
    class Warming(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 5)
            optimizer.step(closure=optimizer_closure)

    fit(run, Warming())


@case
def optimizer_step_every_second_batch(run: Run) -> None:
    class Sometimes(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    fit(run, Sometimes())


@case
def own_zero_grad(run: Run) -> None:
    class Zeroing(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=False)

    fit(run, Zeroing(), accumulate_grad_batches=2)


@case
def hooks_wrapped_on_the_instance(run: Run) -> None:
    """Spies around hooks that nobody overrides: they are called, and none of the hooks counts as overridden."""

    class Plain(Regression):
        scale = torch.ones(3)

        def on_train_start(self) -> None:
            assert self.scale.sum() == 3

    class Nothing(pl.Callback):
        pass

    def spy(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append([name, sorted(map(str, args[-1])) if name.endswith("on_save_checkpoint") else None])
        return function(*args, **kwargs)

    seen: list[Any] = []
    model, callback = Plain(), Nothing()
    hooks = [name for name in dir(pl.Callback) if name.startswith("on_")]
    modules = [*hooks, "configure_model", "configure_sharded_model", "prepare_data", "setup", "teardown", "optimizer_zero_grad"]
    for owner, names in ((model, modules), (callback, hooks)):
        for name in names:
            if (function := getattr(owner, name, None)) is not None:
                wrapped = functools.partial(spy, f"{type(owner).__name__}.{name}", function)
                setattr(owner, name, functools.update_wrapper(wrapped, function))
    trainer = run.trainer(max_epochs=2, callbacks=[callback])
    run.fit(model, trainer, run.loader(*regression_data(32)))
    trainer.save_checkpoint(run.root / "spied.ckpt")
    run.note("seen", seen)


@case
def own_backward(run: Run) -> None:
    class Scaled(Regression):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 0.5).backward()

    fit(run, Scaled())


@case
def parameters_written_in_hooks(run: Run) -> None:
    class Writing(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.3, 0.3)
            self.layer.weight.data[0] *= 0.9
            self.block[1].running_mean.zero_()

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                state = self.state_dict()
                self.load_state_dict({name: value * 0.5 if value.is_floating_point() else value for name, value in state.items()})

    fit(run, Writing(), val=True)


@case
def model_read_in_hooks(run: Run) -> None:
    class Reading(Deep):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            state = self.state_dict()
            seen.append([float(p.sum()) for p in self.parameters()] + [float(state["layer.bias"].sum())])
            seen.append(self.layer.weight.detach().numpy().sum().item())
            with torch.no_grad():
                self.eval()
                seen.append(self(batch[0]).sum().item())
                self.train()

        def on_validation_epoch_end(self) -> None:
            seen.append(copy.deepcopy(self.layer)(torch.ones(1, 8)).sum().item())

    seen: list[Any] = []
    fit(run, Reading(), val=True)
    run.note("seen", seen)


@case
def snapshots_stay_what_they_were(run: Run) -> None:
    class Snapshots(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            kept.append([self.layer.weight.clone(), self.layer.weight.detach().clone(), copy.deepcopy(self.state_dict())])

    kept: list[Any] = []
    fit(run, Snapshots())
    run.note("kept", kept)


@case
def backward_and_step_in_a_hook(run: Run) -> None:
    class Extra(Regression):
        def on_train_epoch_end(self) -> None:
            loss = self.loss(regression_data(16, 7))
            gradients = torch.autograd.grad(loss, list(self.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(self.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient

    fit(run, Extra())


@case
def batch_changed_in_a_hook(run: Run) -> None:
    class Changing(Regression):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = batch
            return x * (2 if self.trainer.training else 3), y

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batch[1].add_(0.1)

    fit(run, Changing(), val=True)


@case
def stopped_inside_an_epoch(run: Run) -> None:
    class Stopping(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 1 and batch_idx == 2 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 3 and batch_idx == 1:
                self.trainer.should_stop = True

    fit(run, Stopping(), val=True, max_epochs=6, accumulate_grad_batches=2)


# -- manual optimization and other fallbacks -------------------------------------------------------------------------------


@case
def manual_optimization(run: Run) -> None:
    class Manual(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            schedule = self.lr_schedulers()
            loss = self.loss(batch)
            for optimizer in (first, second):
                optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            second.step()
            if self.trainer.is_last_batch:
                schedule.step()
            self.log("loss", loss, on_epoch=True)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.layer.parameters(), 0.05)
            second = torch.optim.SGD(self.block.parameters(), 0.01, momentum=0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1, 0.5)]

    fit(run, Manual(), val=True)


@case
def lbfgs(run: Run) -> None:
    class Newton(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=4)

    fit(run, Newton(), val=True)


@case
def sparse_adam(run: Run) -> None:
    class Sparse(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 2, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.mse_loss(self.table(x[:, 0].abs().long() % 10), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam(self.parameters(), lr=0.1)

    fit(run, Sparse())


@case
def branch_on_a_value_in_validation(run: Run) -> None:
    class Branching(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log("val_loss", loss * 2 if loss > 1 else loss)

    fit(run, Branching(), val=True)


@case
def own_optimizer(run: Run) -> None:
    class Signed(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
            return loss

    class Own(Regression):
        def configure_optimizers(self) -> Any:
            return Signed(self.parameters(), 0.01)

    fit(run, Own())


# -- after a run -----------------------------------------------------------------------------------------------------------


@case
def used_after_fit(run: Run) -> None:
    class Predicting(Deep):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    model = Predicting()
    trainer = fit(run, model, val=True)
    x = regression_data(16, 3)[0]
    model.eval()
    with torch.no_grad():
        run.note("output", model(x))
        run.note("copied", copy.deepcopy(model)(x))
    run.note("pickled", pickle.loads(pickle.dumps(model.layer))(x))
    run.note("classes", [type(p).__name__ for p in model.parameters()] + [type(b).__name__ for b in model.buffers()])
    loss = F.mse_loss(model(x), torch.zeros(16, 2))
    loss.backward()
    run.note("gradients", gradients_of(model))
    data = run.loader(*regression_data(32, 2))
    run.note("validated", trainer.validate(model, data, verbose=False))
    run.note("predicted", torch.cat(trainer.predict(model, run.loader(x))))
    second = run.trainer(max_epochs=1)
    second.fit(model, data)
    run.finish(model, second)


@case
def continued_with_the_same_trainer(run: Run) -> None:
    model = Regression()
    trainer = fit(run, model, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, run.loader(*regression_data()))
    run.finish(model, trainer)
