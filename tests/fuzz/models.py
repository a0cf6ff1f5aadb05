"""Modules of one class, optimizers, and parameters that change in a fit: what programs of hooks have beside containers."""

# ruff: noqa: E501 (each line is a row of a table)

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """A change of the model or its optimizer that a hook of the module's makes.

    Attributes:
        hook: which one.
        line: what it runs, with ``module`` and ``trainer``.
        init: statements of ``Net.__init__``.
        step: statements of ``training_step`` on the hidden state ``h``, shape ``[batch, 4]``.
        also: other hooks, and what they run.
    """

    hook: str
    line: str
    init: str = ""
    step: str = ""
    also: tuple[tuple[str, str], ...] = ()


_ONCE = "if trainer.global_step == {at} and not hasattr(module, '{name}_done'):\n    module.{name}_done = True\n    "


def _once(name: str, line: str, at: int = 3) -> str:
    return _ONCE.format(name=name, at=at) + line.replace("\n", "\n    ")


_REBUILT = (
    "listed = {id(p) for group in trainer.optimizers[0].param_groups for p in group['params']}\n"
    "trainer.optimizers[0].param_groups[0]['params'] += [p for p in module.parameters() if id(p) not in listed]\n"
    "trainer.optimizers[0].state.clear()"
)

CHANGES: dict[str, Change] = {
    "frozen": Change("on_train_epoch_start", "module.head.requires_grad_(trainer.current_epoch != 1)"),
    "scaled_weight": Change("on_train_batch_end", "module.head.weight.data.mul_(0.9)"),
    "no_grad_copy": Change("on_train_batch_end", "with torch.no_grad(): module.head.bias.copy_(module.body.bias[:1])"),
    "halved_gradient": Change("on_after_backward", "if module.head.weight.grad is not None: module.head.weight.grad.mul_(0.5)"),
    "rate": Change("on_train_epoch_end", "trainer.optimizers[0].param_groups[0]['lr'] *= 0.5"),
    "evaluated": Change("on_train_batch_start", "module.body.train(trainer.global_step % 2 == 0)"),
    "stopped": Change("on_train_batch_end", "trainer.should_stop = trainer.global_step == 5"),
    "logged": Change("on_train_batch_start", "module.log('h', float(trainer.global_step))"),
    "unfrozen": Change(
        "on_train_epoch_start",
        "module.mid.requires_grad_(trainer.current_epoch > 0)",
        "self.mid = torch.nn.Linear(4, 4).requires_grad_(False)",
        "h = h + 0.1 * module.mid(h)",
    ),
    "unfrozen_one": Change(
        "on_train_batch_start", "module.body.bias.requires_grad = trainer.global_step > 2", "self.body.bias.requires_grad = False"
    ),
    "late": Change(
        "on_train_batch_start",
        _once(
            "late", "module.late = made_linear(4, 4)\ntrainer.optimizers[0].add_param_group({'params': module.late.parameters()})"
        ),
        step="if hasattr(module, 'late'):\n    h = h + 0.1 * module.late(h)",
    ),
    "late_at_epoch": Change(
        "on_train_epoch_end",
        _once("grown", "module.blocks.append(made_linear(4, 4))\n" + _REBUILT, at=4),
        "self.blocks = torch.nn.ModuleList([made_linear(4, 4)])",
        "for block in module.blocks:\n    h = h + 0.1 * block(h)",
    ),
    "widened": Change(
        "on_train_batch_start",
        _once("widened", "module.wide = wider(module.wide)\n" + _REBUILT),
        "self.wide = torch.nn.Sequential(made_linear(4, 3), torch.nn.Tanh(), made_linear(3, 4))",
        "h = h + 0.1 * module.wide(h)",
    ),
    "untied": Change(
        "on_train_batch_start",
        _once(
            "untied",
            "module.t1.weight = torch.nn.Parameter(module.t0.weight.detach().clone())\n"
            "trainer.optimizers[0].add_param_group({'params': [module.t1.weight]})",
        ),
        "self.t0, self.t1 = made_linear(4, 4), made_linear(4, 4); self.t1.weight = self.t0.weight",
        "h = torch.tanh(module.t1(torch.tanh(module.t0(h))))",
    ),
    "parameter_replaced": Change(
        "on_train_batch_start", _once("replaced", "module.head.weight = torch.nn.Parameter(module.head.weight.detach() * 0.5)")
    ),
    "data_replaced": Change("on_train_batch_end", "module.body.weight.data = module.body.weight.data * 0.95"),
    "state_cleared": Change("on_train_epoch_end", "trainer.optimizers[0].state.clear()"),
    "state_loaded": Change("on_train_epoch_end", "trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())"),
    "model_loaded": Change(
        "on_train_epoch_end", "module.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in module.state_dict().items()})"
    ),
    "state_of_one_back": Change(
        "on_train_batch_end",
        "if trainer.global_step in (2, 3): module.state_kept = copy.deepcopy(trainer.optimizers[-1].state_dict())\n"
        "if trainer.global_step in (5, 7): trainer.optimizers[-1].load_state_dict(module.state_kept)",
        "self.state_kept = {'state': {}, 'param_groups': []}",
    ),
    "states_back": Change(
        "on_train_epoch_end",
        "if trainer.current_epoch: [one.load_state_dict(kept) for one, kept in zip(trainer.optimizers, module.states_kept)]\n"
        "module.states_kept = [copy.deepcopy(one.state_dict()) for one in trainer.optimizers]",
    ),
    "snapshot": Change(
        "on_train_batch_end",
        "if trainer.global_step == 3:\n"
        "    module.shot = [copy.deepcopy(module.state_dict()), *[copy.deepcopy(one.state_dict()) for one in trainer.optimizers]]\n"
        "if trainer.global_step == 6 and module.shot:\n"
        "    module.load_state_dict(module.shot[0], strict=False)\n"
        "    for one, kept in zip(trainer.optimizers, module.shot[1:]): one.load_state_dict(kept)",
        "self.shot = []",
    ),
    "state_halved": Change(
        "on_train_epoch_start",
        "for one in trainer.optimizers[:1]:\n    for entry in one.state.values():\n        for value in entry.values():\n"
        "            if isinstance(value, torch.Tensor) and value.ndim: value.mul_(0.5)",
    ),
    "state_replaced": Change(
        "on_train_batch_end",
        "for entry in trainer.optimizers[-1].state.values():\n    for name, value in list(entry.items()):\n"
        "        if isinstance(value, torch.Tensor) and value.ndim: entry[name] = value * 0.5",
    ),
    "state_held": Change(
        "on_train_batch_end",
        "if trainer.global_step == 2: module.held = [v for entry in trainer.optimizers[0].state.values() for v in entry.values()"
        " if isinstance(v, torch.Tensor) and v.ndim]\n"
        "SEEN.append([-2, *[float(one.sum()) for one in module.held]])",
        "self.held = []",
    ),
    "state_seen": Change(
        "on_train_batch_end",
        "SEEN.append([-3, *[float(v.sum()) for one in trainer.optimizers for entry in one.state_dict()['state'].values()"
        " for v in entry.values() if isinstance(v, torch.Tensor)]])",
    ),
    "decayed": Change("on_train_epoch_end", "trainer.optimizers[-1].param_groups[0]['weight_decay'] += 0.1"),
    "momentum": Change(
        "on_train_batch_end",
        "for one in trainer.optimizers:\n    for group in one.param_groups:\n"
        "        group.update(betas=(0.5, 0.9)) if 'betas' in group else group.update(momentum=0.3) if group['momentum'] else None",
    ),
    "group_replaced": Change(
        "on_train_epoch_start",
        "one = trainer.optimizers[0]; one.param_groups[0] = {**one.param_groups[0], 'lr': 0.01 * (1 + trainer.current_epoch)}",
    ),
    "group_shortened": Change(
        "on_train_batch_end",
        _once("short", "trainer.optimizers[0].state.pop(trainer.optimizers[0].param_groups[0]['params'].pop(), None)"),
    ),
    "group_shared": Change(
        "on_train_batch_end",
        _once(
            "shared",
            "if len(trainer.optimizers) > 1:\n    trainer.optimizers[1].add_param_group("
            "{'params': [trainer.optimizers[0].param_groups[0]['params'][0]], 'lr': 0.01})",
        ),
    ),
    "parameter_moved": Change(
        "on_train_batch_end",
        _once(
            "moved",
            "p = trainer.optimizers[0].param_groups[0]['params'].pop()\n"
            "trainer.optimizers[0].state.pop(p, None)\ntrainer.optimizers[-1].add_param_group({'params': [p], 'lr': 0.03})",
        ),
    ),
    "optimizers_turned": Change("on_train_epoch_end", "trainer.optimizers = trainer.optimizers[::-1]"),
    "optimizer_anew": Change(
        "on_train_batch_end",
        _once("anew", "trainer.optimizers = [torch.optim.SGD(list(module.parameters()), lr=0.03, momentum=0.9), *trainer.optimizers[1:]]"),
    ),
    "scheduler_back": Change(
        "on_train_epoch_end",
        "for one in trainer.lr_scheduler_configs:\n"
        "    if trainer.current_epoch: one.scheduler.load_state_dict(module.schedule)\n"
        "    module.schedule = copy.deepcopy(one.scheduler.state_dict())",
    ),
    "averaged": Change(
        "on_train_batch_end",
        "with torch.no_grad(): [a.lerp_(b, 0.4) for a, b in zip(module.average.parameters(), module.body.parameters())]\n"
        "SEEN.append([-4, float(module.average.weight.sum())])",
        "self.average = copy.deepcopy(self.body).requires_grad_(False)",
        "h = h + 0.1 * module.average(h).detach()",
    ),
    "averaged_outside": Change(
        "on_train_batch_end",
        "for name, value in module.body.state_dict().items(): OUTSIDE[name] = OUTSIDE.get(name, value.clone()).lerp(value, 0.3)\n"
        "if trainer.global_step in (4, 7): module.body.load_state_dict(OUTSIDE)",
        "globals()['OUTSIDE'] = {}",
    ),
    "swapped_to_validate": Change(
        "on_validation_start",
        "module.own = {k: v.clone() for k, v in module.state_dict().items()}\n"
        "module.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in module.own.items()})",
        also=(("on_validation_end", "module.load_state_dict(module.own)"),),
    ),
    "data_swapped_to_validate": Change(
        "on_validation_epoch_start",
        "module.other = [p.data.clone() * 0.5 for p in module.head.parameters()]\n"
        "for p, q in zip(module.head.parameters(), range(9)): p.data, module.other[q] = module.other[q], p.data",
        also=(("on_validation_epoch_end", "for p, q in zip(module.head.parameters(), module.other): p.data = q"),),
    ),
    "gradient_added": Change(
        "on_before_optimizer_step",
        "for p in module.body.parameters(): p.grad = p.grad + 0.01 if p.grad is not None else torch.full_like(p, 0.01)",
    ),
    "pruned": Change("on_train_batch_start", _once("pruned", "prune.l1_unstructured(module.body, 'weight', 0.3)")),
    "weight_norm_removed": Change(
        "on_train_batch_start",
        _once("plain", "torch.nn.utils.parametrize.remove_parametrizations(module.body, 'weight')\n" + _REBUILT),
        "torch.nn.utils.parametrizations.weight_norm(self.body)",
    ),
    "forward_hook": Change(
        "on_train_batch_start", _once("hooked", "module.body.register_forward_hook(lambda one, x, y: y * 0.5)")
    ),
    "forward_hook_removed": Change(
        "on_train_batch_start",
        _once("removed", "module.handle.remove()"),
        "self.handle = self.body.register_forward_pre_hook(lambda one, x: (x[0] * 0.5,))",
    ),
    "forward_replaced": Change(
        "on_train_batch_start",
        _once("own", "module.body.forward = types.MethodType(lambda one, x: F.linear(x, one.weight), module.body)"),
    ),
    "buffer_replaced": Change(
        "on_train_batch_end", "module.kept = module.kept * 0.5 + 0.1", "self.register_buffer('kept', torch.ones(4))", "h = h * module.kept"
    ),
    "buffer_grown": Change(
        "on_train_batch_end",
        "module.seen = torch.cat([module.seen, torch.ones(1)])",
        "self.register_buffer('seen', torch.ones(1))",
        "h = h / module.seen.sum()",
    ),
    "buffer_of_step": Change(
        "on_train_epoch_end",
        "module.mean.zero_()",
        "self.register_buffer('mean', torch.zeros(4))",
        "module.mean.lerp_(h.detach().mean(0), 0.3); h = h - module.mean",
    ),
    "gradient_counted": Change(
        "on_train_epoch_start",
        "module.hits = []; [one.remove() for one in module.handles]; module.handles = "
        "[one.register_hook(lambda g: module.hits.append(1)) for one in module.head.parameters() if one.requires_grad]",
        "self.handles = []",
    ),
    "normalised": Change(
        "on_train_batch_start",
        "module.norm.train(trainer.global_step % 3 != 0)",
        "self.norm = torch.nn.BatchNorm1d(4)",
        "h = module.norm(h)",
    ),
    "dropped": Change(
        "on_train_epoch_start", "module.drop.p = float(trainer.current_epoch)", "self.drop = torch.nn.Dropout(0.0)", "h = module.drop(h)"
    ),
}  # fmt: skip

FORMS = {
    "list": "self.parts{n} = torch.nn.ModuleList([Part(i) for i in range({k})])",
    "dict": "self.held{n} = torch.nn.ModuleDict({{str(i): Part(i) for i in range({k})}}); self.parts{n} = ByNumber(self.held{n})",
    "deepcopied": "self.parts{n} = torch.nn.ModuleList([Part(0)]); self.parts{n}.extend([copy.deepcopy(self.parts{n}[0]) for _ in range({k} - 1)])",
    "nested": "self.parts{n} = torch.nn.ModuleList([Part(i, inner=Part(i + 5)) for i in range({k})])",
    "nested_shared": "one = Part(7); self.parts{n} = torch.nn.ModuleList([Part(i, inner=one) for i in range({k})])",
    "tied": "self.parts{n} = torch.nn.ModuleList([Part(i) for i in range({k})]); self.parts{n}[1].inside.weight = self.parts{n}[0].inside.weight",
    "one_twice": "one = Part(0); self.parts{n} = torch.nn.ModuleList([one, *[Part(i) for i in range({k} - 2)], one])",
    "sequential": "self.parts{n} = torch.nn.Sequential(*[Part(i) for i in range({k})])",
    "outside": "self.parts{n} = tuple(Part(i) for i in range({k}))",
    "lightning": "self.parts{n} = torch.nn.ModuleList([LightningPart(i) for i in range({k})])",
    "of_class": "type(self).parts{n} = tuple(Part(i).requires_grad_(False) for i in range({k}))",
    "pickled": "self.parts{n} = torch.nn.ModuleList([pickle.loads(pickle.dumps(Part(i))) for i in range({k})])",
}
"""How the modules of one class are made and kept."""

ORDERS = {
    "in_turn": "range({k})",
    "backwards": "reversed(range({k}))",
    "rotating": "[(i + batch_idx) % {k} for i in range({k})]",
    "one": "[batch_idx % {k}]",
    "shuffled": "random.Random(batch_idx).sample(range({k}), {k})",
    "twice": "[*range({k}), 0]",
    "picked": "[module.pick{n} % {k}]",
    "by_state": "sorted(range({k}), key=lambda i: module.parts{n}[i].scale)",
    "as_many": "range(min({k}, module.pick{n} + 1))",
}

WAYS = {
    "called": "h = module.parts{n}[i](h)",
    "method": "h = module.parts{n}[i].encoded(h)",
    "function": "h = functools.partial(type(module.parts{n}[i]).forward, module.parts{n}[i])(h)",
    "functional": "h = torch.func.functional_call(module.parts{n}[i], dict(module.parts{n}[i].named_parameters()), (h,))",
    "checkpointed": "h = torch.utils.checkpoint.checkpoint(module.parts{n}[i], h, use_reentrant=False)",
    "not_trained": "with torch.no_grad(): kept = module.parts{n}[i](h)\nh = h + 0.1 * kept",
    "residual": "h = h + 0.3 * module.parts{n}[i](h)",
    "compared": "h = h + 0.3 * (module.parts{n}[i](h) - module.parts{n}[0](h).detach())",
    "net_method": "h = module.through{n}(h, i)",
    "bound": "h = module.calls{n}[i](h)",
}

STIRS = {
    "nothing": "pass",
    "scale": "module.parts{n}[trainer.global_step % {k}].scale = 0.5 + trainer.global_step / 9",
    "scale_of_class": "type(module.parts{n}[0]).common = 0.5 + trainer.current_epoch",
    "pick": "module.pick{n} = trainer.global_step // 2",
    "copied": "module.parts{n}[1].load_state_dict(module.parts{n}[0].state_dict())",
    "averaged": "with torch.no_grad(): [a.lerp_(b, 0.5) for a, b in zip(module.parts{n}[1].parameters(), module.parts{n}[0].parameters())]",
    "frozen": "module.parts{n}[1].requires_grad_(trainer.global_step % 2 == 0)",
    "evaluated": "module.parts{n}[0].train(trainer.current_epoch == 0)",
    "counted": "module.seen{n} = [one.calls for one in module.parts{n}]; SEEN.append([-1, *module.seen{n}])",
    "buffers": "module.parts{n}[0].count.fill_(trainer.global_step)",
}
STIRRED = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_validation_start", "on_validation_epoch_end")


class Optimizing(NamedTuple):
    """How a program optimizes: the body of ``configure_optimizers``, and of the end of ``training_step`` where that is manual."""

    configured: str
    manual: str = ""


_TWO = (
    "one = torch.optim.SGD(self.body.parameters(), lr=0.05)\n"
    "head = {id(p) for p in self.body.parameters()}\n"
    "two = torch.optim.Adam([p for p in self.parameters() if id(p) not in head], lr=0.02)\n"
    "return [one, two]"
)
_SGD = "one = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)\n"

OPTIMIZERS: tuple[Optimizing, ...] = (
    Optimizing("return torch.optim.SGD(self.parameters(), lr=0.05)"),
    Optimizing("return torch.optim.SGD(self.parameters(), lr=0.05)"),
    Optimizing("return torch.optim.Adam(self.parameters(), lr=0.02)"),
    Optimizing(
        "kept = {id(p) for p in self.head.parameters()}\n"
        "return torch.optim.SGD([{'params': self.head.parameters(), 'lr': 0.01},"
        " {'params': [p for p in self.parameters() if id(p) not in kept]}], lr=0.05, momentum=0.9)"
    ),
    Optimizing(_SGD + "return [one], [torch.optim.lr_scheduler.StepLR(one, 1, 0.5)]"),
    Optimizing(
        _SGD + "return {'optimizer': one, 'lr_scheduler': {'interval': 'step', 'scheduler':"
        " torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step))}}"
    ),
    Optimizing(
        _SGD + "return {'optimizer': one, 'lr_scheduler': {'monitor': 'loss', 'scheduler':"
        " torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0)}}"
    ),
    Optimizing(
        "return torch.optim.AdamW(self.parameters(), lr=0.02)",
        "opt = self.optimizers(); opt.zero_grad(); self.manual_backward(loss); opt.step()",
    ),
    Optimizing(_TWO, "for opt in self.optimizers(): opt.zero_grad()\nself.manual_backward(loss)\nfor opt in self.optimizers(): opt.step()"),
    Optimizing(_TWO, "opt = self.optimizers()[batch_idx % 2]\nopt.zero_grad(); self.manual_backward(loss); opt.step()"),
    Optimizing(
        _TWO,
        "for number, opt in enumerate(self.optimizers()):\n"
        "    self.toggle_optimizer(opt); opt.zero_grad()\n"
        "    self.manual_backward(F.mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[1]) * (number + 1))\n"
        "    opt.step(); self.untoggle_optimizer(opt)",
    ),
    Optimizing(
        _SGD + "return one",
        "opt = self.optimizers(); self.manual_backward(loss / 2)\nif (batch_idx + 1) % 2 == 0:\n    opt.step(); opt.zero_grad()",
    ),
    Optimizing(
        _SGD + "return [one], [torch.optim.lr_scheduler.ExponentialLR(one, 0.8)]",
        "opt = self.optimizers(); opt.zero_grad(); self.manual_backward(loss)\n"
        "self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm='norm'); opt.step(); self.lr_schedulers().step()",
    ),
    Optimizing(
        _SGD + "return one",
        "opt = self.optimizers()\n"
        "def closure():\n"
        "    opt.zero_grad(); again = F.mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[1]); self.manual_backward(again)\n"
        "    return again\n"
        "opt.step(closure=closure)",
    ),
)  # fmt: skip
