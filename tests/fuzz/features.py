"""Features of random scripts besides host state: effects, hooks, optimization, loaders, exceptions, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.programs import Parts

Feature = Callable[["Parts", int], None]
FEATURES: dict[str, Feature] = {}


def feature(function: Feature) -> Feature:
    FEATURES[function.__name__] = function
    return function


# -- effects of a step ---------------------------------------------------------------------------------------------------


@feature
def appends_to_list(parts: Parts, n: int) -> None:
    parts.init.append(f"self.l{n} = []")
    parts.after.append(f"self.l{n}.append(loss.detach())")
    parts.record.append(f"net.l{n}")


@feature
def appends_to_global(parts: Parts, n: int) -> None:
    parts.after.append(f"SEEN.append(({n}, batch_idx, loss.detach()))")


@feature
def prints(parts: Parts, n: int) -> None:
    parts.after.append(f"print('P{n}', batch_idx, f'{{loss.item():.3f}}')")


@feature
def prints_every_other(parts: Parts, n: int) -> None:
    parts.after.append(f"if batch_idx % 2:\n    print('P{n}', self.current_epoch, batch_idx)")


@feature
def sets_attribute(parts: Parts, n: int) -> None:
    parts.init.append(f"self.a{n} = None")
    parts.after.append(f"self.a{n} = loss.detach() * 2")
    parts.record.append(f"net.a{n}")
    parts.hook("on_train_batch_end", f"SEEN.append(float(module.a{n}))")


@feature
def counts_steps(parts: Parts, n: int) -> None:
    parts.init.append(f"self.n{n} = 0")
    parts.after.append(f"self.n{n} += 1")
    parts.record.append(f"net.n{n}")


@feature
def counts_in_dict(parts: Parts, n: int) -> None:
    parts.init.append(f"self.d{n} = collections.defaultdict(int)")
    parts.after.append(f"self.d{n}[batch_idx % 2] += 1")
    parts.record.append(f"sorted(net.d{n}.items())")


@feature
def counts_in_function(parts: Parts, n: int) -> None:
    parts.module.append(f"def helper{n}():\n    helper{n}.calls += 1\nhelper{n}.calls = 0")
    parts.after.append(f"helper{n}()")
    parts.record.append(f"helper{n}.calls")


@feature
def counts_in_global(parts: Parts, n: int) -> None:
    parts.module.append(f"G{n} = [0]\ndef count{n}():\n    G{n}[0] += 1")
    parts.after.append(f"count{n}()")
    parts.record.append(f"G{n}")


@feature
def counts_in_bytearray(parts: Parts, n: int) -> None:
    parts.init.append(f"self.b{n} = bytearray(1)")
    parts.after.append(f"self.b{n}[0] += 1")
    parts.record.append(f"list(net.b{n})")


@feature
def writes_trainer_attribute(parts: Parts, n: int) -> None:
    parts.after.append(f"self.trainer.custom{n} = batch_idx")
    parts.record.append(f"trainer.custom{n}")


@feature
def writes_list_subclass_attribute(parts: Parts, n: int) -> None:
    parts.module.append(f"class List{n}(list):\n    pass")
    parts.init.append(f"self.l{n} = List{n}()")
    parts.after.append(f"self.l{n}.last = batch_idx")
    parts.record.append(f"net.l{n}.last")


@feature
def keeps_closure(parts: Parts, n: int) -> None:
    parts.init.append(f"self.l{n} = []")
    parts.after.append(f"self.l{n}.append(lambda: batch_idx)")
    parts.record.append(f"[int(one()) for one in net.l{n}]")


@feature
def sets_log_level(parts: Parts, n: int) -> None:
    parts.module.append(f"LOG{n} = logging.getLogger('level{n}')\nLOG{n}.setLevel(10)")
    parts.after.append(f"LOG{n}.setLevel(20)")
    parts.record.append(f"LOG{n}.level")


@feature
def fills_weak_dict(parts: Parts, n: int) -> None:
    parts.module.append(f"W{n} = weakref.WeakKeyDictionary()")
    parts.after.append(f"W{n}[self] = batch_idx")
    parts.record.append(f"[int(one) for one in W{n}.values()]")


@feature
def fills_set(parts: Parts, n: int) -> None:
    parts.init.append(f"self.s{n} = set()")
    parts.after.append(f"self.s{n}.add(batch_idx)")
    parts.record.append(f"sorted(map(int, net.s{n}))")


@feature
def changes_batch(parts: Parts, n: int) -> None:
    of_one_loader = f"b{n} = batch['a'] if isinstance(batch, dict) else batch"
    parts.step.append(f"{of_one_loader}\nx.mul_(0.9)\nb{n}[1] = y * 1.1\nb{n}.append(batch_idx)")
    seen = f"[float(b{n}[0].sum()), float(b{n}[1].sum()), len(b{n}), b{n}[-1]]"
    parts.hook("on_train_batch_end", f"{of_one_loader}\nSEEN.append({seen})")


@feature
def keeps_best(parts: Parts, n: int) -> None:
    parts.init.append(f"self.register_buffer('best{n}', torch.full((), 1e9))")
    parts.after.append(f"self.best{n} = torch.minimum(self.best{n}, loss.detach())")
    parts.record.append(f"net.best{n}")


@feature
def buffer_in_place(parts: Parts, n: int) -> None:
    parts.init.append(f"self.register_buffer('sum{n}', torch.zeros(()))")
    parts.after.append(f"self.sum{n} += loss.detach()")
    parts.record.append(f"net.sum{n}")


@feature
def draws_python(parts: Parts, n: int) -> None:
    parts.module.append("random.seed(3)")
    parts.step.append("scale = scale * (1 + 0.1 * random.random())")
    parts.record.append("random.random()")


@feature
def draws_numpy(parts: Parts, n: int) -> None:
    parts.module.append("np.random.seed(3)")
    parts.step.append("scale = scale * (1 + 0.1 * np.random.uniform())")
    parts.record.append("float(np.random.uniform())")


@feature
def draws_arrays(parts: Parts, n: int) -> None:
    parts.module.append("np.random.seed(3)")
    drawn = f"d{n} = np.random.normal(0, 1, (2, 3))\nscale = scale * (1 + 0.1 * d{n}.mean())"
    parts.step.append(f"{drawn}\nscale = scale + 0.1 * float(d{n}[0, 1])\nif d{n}[1, 0] > 1:\n    scale = scale * 1.5")
    parts.after.append(f"loss = loss * (1 + 0.1 * torch.from_numpy(d{n}).float().tanh().mean())")
    parts.record.append("float(np.random.uniform())")


@feature
def draws_shuffle(parts: Parts, n: int) -> None:
    parts.module.append("random.seed(3)")
    parts.init.append(f"self.o{n} = [1.0, 2.0, 3.0]")
    parts.step.append(f"random.shuffle(self.o{n})\nscale = scale * self.o{n}[0] / 2")
    parts.record.append("random.random()")


@feature
def draws_before_refusal(parts: Parts, n: int) -> None:
    parts.module.append("random.seed(3)")
    parts.step.append("scale = scale * (1 + 0.1 * random.random())\nif x.sum() > 0:\n    scale = scale * 1.1")
    parts.record.append("random.random()")


# -- control flow --------------------------------------------------------------------------------------------------------


@feature
def branch_on_tensor(parts: Parts, n: int) -> None:
    parts.step.append("if x.mean() > 0:\n    scale = scale * 1.2")


@feature
def branch_on_loss(parts: Parts, n: int) -> None:
    parts.after.append(f"if loss > 1.0:\n    SEEN.append(({n}, batch_idx))\n    loss = loss * 0.7")


@feature
def refuses_bad_loss(parts: Parts, n: int) -> None:
    parts.after.append("if torch.isnan(loss) or not math.isfinite(loss.item()):\n    raise ValueError('bad')\nassert loss >= 0")


@feature
def best_in_attribute(parts: Parts, n: int) -> None:
    parts.init.append(f"self.best{n} = float('inf')")
    parts.after.append(f"if float(loss) < self.best{n}:\n    self.best{n} = loss.item()")
    parts.record.append(f"net.best{n}")


@feature
def skips_large_loss(parts: Parts, n: int) -> None:
    parts.after.append("if loss.item() > 2.0:\n    return None")
    parts.settings["returns"] = "none"


@feature
def draws_before_branch_on_loss(parts: Parts, n: int) -> None:
    parts.module.append("random.seed(3)")
    parts.after.append("draw = random.random()\nif loss > 1.0:\n    loss = loss * (1 + 0.1 * draw * random.random())")
    parts.record.append("random.random()")


@feature
def shrinks_loss(parts: Parts, n: int) -> None:
    parts.after.append("rounds = 0\nwhile loss > 0.8 and rounds < 3:\n    loss, rounds = loss * 0.6, rounds + 1")
    parts.after.append(f"SEEN.append(({n}, rounds))")


@feature
def branch_on_validation_loss(parts: Parts, n: int) -> None:
    parts.validation.append(f"if loss > 1.0:\n    SEEN.append(({n}, 'large', batch_idx))")


@feature
def branch_on_batch_idx(parts: Parts, n: int) -> None:
    parts.step.append("if batch_idx % 2 == 0:\n    scale = scale * 1.2")


@feature
def raises_at(parts: Parts, n: int) -> None:
    parts.after.append(
        f"SEEN.append(batch_idx)\nprint('P{n}', batch_idx)\nif self.current_epoch == 1 and batch_idx == 2:\n"
        "    raise ValueError('wanted')"
    )


@feature
def skips_batches(parts: Parts, n: int) -> None:
    parts.after.append("if batch_idx == 1:\n    return None")
    parts.settings["returns"] = "none"


@feature
def tries_and_catches(parts: Parts, n: int) -> None:
    parts.init.append(f"self.d{n} = {{}}")
    parts.step.append(f"try:\n    scale = scale * self.d{n}['k']\nexcept KeyError:\n    pass")
    parts.hook("on_train_batch_start", f"if batch_idx == 3:\n    module.d{n}['k'] = 1.3")


@feature
def generator_in_step(parts: Parts, n: int) -> None:
    parts.init.append(f"self.l{n} = [1.0, 1.1]")
    parts.step.append(f"scale = scale * sum(one for one in self.l{n}) / 2")
    parts.hook("on_train_batch_start", f"if batch_idx == 3:\n    module.l{n}.append(0.5)")


@feature
def match_statement(parts: Parts, n: int) -> None:
    parts.init.append(f"self.d{n} = {{'kind': 'a'}}")
    parts.step.append(
        f"match self.d{n}:\n    case {{'kind': 'a'}}:\n        scale = scale * 1.1\n    case _:\n        scale = scale * 0.9"
    )
    parts.hook("on_train_batch_start", f"if batch_idx == 3:\n    module.d{n}['kind'] = 'b'")


# -- hooks ---------------------------------------------------------------------------------------------------------------


@feature
def hook_order(parts: Parts, n: int) -> None:
    for name in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"):
        parts.hook(name, f"SEEN.append('{name}')")
        parts.hook(name, f"SEEN.append('callback {name}')", callback=True)


@feature
def changes_gradients(parts: Parts, n: int) -> None:
    parts.hook("on_before_optimizer_step", "for p in module.parameters():\n    p.grad *= 0.5")


@feature
def reads_gradients(parts: Parts, n: int) -> None:
    parts.hook("on_after_backward", "SEEN.append(module.layer.weight.grad.norm())")


@feature
def freezes_before_backward(parts: Parts, n: int) -> None:
    parts.hook(
        "on_before_backward",
        "if trainer.global_step == 4:\n    module.layer.bias.requires_grad_(False)",
    )


@feature
def freezes_before_zero_grad(parts: Parts, n: int) -> None:
    parts.hook("on_before_zero_grad", "if trainer.global_step == 4:\n    module.layer.bias.requires_grad_(False)")


@feature
def freezes_after_backward(parts: Parts, n: int) -> None:
    parts.hook("on_after_backward", "if trainer.global_step == 4:\n    module.layer.bias.requires_grad_(False)")


@feature
def freezes_before_step(parts: Parts, n: int) -> None:
    parts.hook("on_before_optimizer_step", "if trainer.global_step == 4:\n    module.layer.bias.requires_grad_(False)")


@feature
def unfreezes_before_backward(parts: Parts, n: int) -> None:
    parts.init.append("self.layer.bias.requires_grad_(False)")
    parts.hook("on_before_backward", "if trainer.global_step == 4:\n    module.layer.bias.requires_grad_(True)", callback=True)


@feature
def changes_options_before_step(parts: Parts, n: int) -> None:
    parts.hook("on_before_optimizer_step", "if trainer.global_step == 4:\n    optimizer.param_groups[0]['lr'] = 0.03")


@feature
def changes_flags_before_step(parts: Parts, n: int) -> None:
    parts.hook("on_before_optimizer_step", "optimizer.param_groups[0]['maximize'] = trainer.global_step == 4")


@feature
def adds_parameters_in_hook(parts: Parts, n: int) -> None:
    parts.init.append(f"self.p{n} = torch.nn.Parameter(torch.ones(()))")
    parts.settings["configure"] = "return torch.optim.SGD(self.layer.parameters(), lr=0.1)"
    parts.step.append(f"scale = scale * self.p{n}")
    parts.hook(
        "on_before_zero_grad",
        f"if trainer.global_step == 4:\n    optimizer.add_param_group({{'params': [module.p{n}], 'lr': 0.01}})",
    )


@feature
def freezes_in_hook(parts: Parts, n: int) -> None:
    parts.hook("on_train_epoch_start", "module.layer.bias.requires_grad_(trainer.current_epoch != 1)")


@feature
def writes_weights(parts: Parts, n: int) -> None:
    parts.hook("on_train_batch_end", "if batch_idx == 2:\n    module.layer.bias.data.add_(0.1)", callback=True)


@feature
def clears_lists(parts: Parts, n: int) -> None:
    parts.init.append(f"self.l{n} = []")
    parts.after.append(f"self.l{n}.append(loss.detach())")
    parts.hook("on_train_epoch_end", f"SEEN.append(torch.stack(module.l{n}).mean())\nmodule.l{n}.clear()")


@feature
def validation_outputs(parts: Parts, n: int) -> None:
    parts.init.append(f"self.v{n} = []")
    parts.validation.append(f"self.v{n}.append(loss)")
    parts.hook("on_validation_epoch_end", f"module.log('v{n}', torch.stack(module.v{n}).sum())\nmodule.v{n}.clear()")


@feature
def stops_early(parts: Parts, n: int) -> None:
    parts.hook("on_train_batch_end", "if trainer.global_step >= 7:\n    trainer.should_stop = True")


# -- logging -------------------------------------------------------------------------------------------------------------


@feature
def logs_on_epoch(parts: Parts, n: int) -> None:
    parts.after.append(f"self.log('e{n}', loss * 2, on_step=True, on_epoch=True)")


@feature
def logs_sometimes(parts: Parts, n: int) -> None:
    parts.after.append(f"if batch_idx % 2:\n    self.log('s{n}', loss * 3)")


@feature
def logs_dict_max(parts: Parts, n: int) -> None:
    parts.after.append(f"self.log_dict({{'m{n}': loss}}, on_step=False, on_epoch=True, reduce_fx='max')")


@feature
def logs_in_validation_sometimes(parts: Parts, n: int) -> None:
    parts.validation.append(f"if batch_idx == 1:\n    self.log('w{n}', loss * 2, on_step=True)")


@feature
def logs_metric_object(parts: Parts, n: int) -> None:
    parts.module.append("import torchmetrics")
    parts.init.append(f"self.m{n} = torchmetrics.MeanSquaredError()")
    parts.after.append(f"self.m{n}(self.layer(x), y)\nself.log('t{n}', self.m{n}, on_step=False, on_epoch=True)")


@feature
def logs_metric_on_step(parts: Parts, n: int) -> None:
    parts.module.append("import torchmetrics")
    parts.init.append(f"self.m{n} = torchmetrics.MeanMetric()")
    parts.after.append(f"self.m{n}.update(loss)\nself.log('t{n}', self.m{n}, on_step=True, on_epoch=True)")


# -- optimization --------------------------------------------------------------------------------------------------------


@feature
def manual(parts: Parts, n: int) -> None:
    parts.settings["manual"] = "yes"


@feature
def manual_accumulation(parts: Parts, n: int) -> None:
    parts.settings["manual"] = "yes"
    parts.settings["step_end"] = (
        "self.manual_backward(loss / 2)\nif (batch_idx + 1) % 2 == 0:\n    optimizer = self.optimizers()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\nself.log('loss', loss)"
    )
    parts.trainer["val_check_interval"] = "3"


@feature
def adam_with_scheduler(parts: Parts, n: int) -> None:
    parts.settings["configure"] = (
        "optimizer = torch.optim.Adam(self.parameters(), lr=0.05)\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)\n"
        "return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'interval': 'step'}}"
    )


@feature
def epoch_scheduler(parts: Parts, n: int) -> None:
    parts.settings["configure"] = (
        "optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)\n"
        "return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]"
    )


@feature
def accumulates(parts: Parts, n: int) -> None:
    parts.trainer["accumulate_grad_batches"] = "2"


@feature
def clips(parts: Parts, n: int) -> None:
    parts.trainer["gradient_clip_val"] = "0.5"


@feature
def clips_beside_a_stranger(parts: Parts, n: int) -> None:
    """A parameter of no optimizer is no part of the norm."""
    parts.init.append(f"self.p{n} = torch.nn.Parameter(torch.ones(()))")
    parts.settings["configure"] = "return torch.optim.SGD(self.layer.parameters(), lr=0.1)"
    parts.step.append(f"scale = scale * self.p{n}")
    parts.trainer["gradient_clip_val"] = "0.5"


@feature
def validates_often(parts: Parts, n: int) -> None:
    parts.trainer["val_check_interval"] = "2"


@feature
def no_sanity(parts: Parts, n: int) -> None:
    parts.trainer["num_sanity_val_steps"] = "0"


@feature
def long_run(parts: Parts, n: int) -> None:
    parts.trainer["max_epochs"] = "5"


# -- data ----------------------------------------------------------------------------------------------------------------


@feature
def two_loaders(parts: Parts, n: int) -> None:
    parts.settings["loaders"] = "{'a': loader(TRAIN), 'b': loader(Data(12, 5))}"
    parts.settings["unpack"] = "(x, y), (x2, y2) = batch['a'], batch['b']; y = y + y2.mean()"
    parts.trainer["reload_dataloaders_every_n_epochs"] = "0"


@feature
def uneven(parts: Parts, n: int) -> None:
    parts.trainer["limit_train_batches"] = "4"


# -- autograd ------------------------------------------------------------------------------------------------------------


@feature
def no_grad_part(parts: Parts, n: int) -> None:
    parts.after.append("with torch.no_grad():\n    extra = self.layer(x).mean()\nloss = loss + 0.1 * extra")


@feature
def custom_function(parts: Parts, n: int) -> None:
    parts.module.append(
        f"class Twice{n}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x.clone()\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        return grad * 2"
    )
    parts.after.append(f"loss = Twice{n}.apply(loss)")


@feature
def tensor_hook(parts: Parts, n: int) -> None:
    parts.after.append("loss.register_hook(lambda grad: grad * 0.5)")


@feature
def checkpointed(parts: Parts, n: int) -> None:
    parts.module.append("from torch.utils.checkpoint import checkpoint")
    parts.after.append("loss = loss + 0.1 * checkpoint(self.layer, x, use_reentrant=False).pow(2).mean()")


@feature
def second_gradient(parts: Parts, n: int) -> None:
    parts.after.append(
        "(g,) = torch.autograd.grad(self.layer(x).pow(2).sum(), self.layer.weight, create_graph=True)\n"
        "loss = loss + 0.01 * g.pow(2).sum()"
    )


@feature
def detaches(parts: Parts, n: int) -> None:
    parts.after.append("loss = loss + 0.1 * (self.layer(x).detach() - y).abs().mean()")
