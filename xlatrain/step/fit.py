"""Training of a :class:`~xlatrain.step.jax_module.JaxModule` by the engine alone: no Trainer, and no torch.

::

    fitted = xlatrain.fit(Classifier, train_batches, val_batches, max_epochs=3, checkpoint_path="run.ckpt", log=print)
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from xlatrain import checkpoint
from xlatrain.mesh.data import GlobalBatch
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.step.engine import Engine
from xlatrain.step.fit_module import module_shapes, optimizer_of
from xlatrain.step.jax_module import JaxModule, attach
from xlatrain.step.jax_step import TracedStep, accepted, has, trace_step, where
from xlatrain.step.logged_values import EpochValues, LoggedArrays, log_options
from xlatrain.step.purity import check_pure
from xlatrain.step.state import TrainState
from xlatrain.step.variables import PlainAttributes, StructureError

Batches: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
"""An iterable of pytrees of numpy or JAX arrays, begun anew each epoch; or a function of the epoch's number that gives one."""

LogFunction: TypeAlias = Callable[[int, dict[str, float]], Any]
"""``(step, values)``: what was logged, after so many steps of the optimizer."""

_FILE = "fit.json"


class Fitted(NamedTuple):
    """The results of :func:`fit`.

    Attributes:
        module: with the trained values in its variables.
        state: the arrays, on the mesh, as the checkpoint has them.
        metrics: the last value of everything that was logged, by name.
        step: the optimizer steps taken, those before a resumption included.
        epoch: the epochs ended.
    """

    module: Any
    state: TrainState
    metrics: dict[str, float]
    step: int
    epoch: int


def fit(
    make_module: Callable[[nnx.Rngs], JaxModule],
    train_batches: Batches,
    val_batches: Batches | None = None,
    *,
    max_epochs: int | None = None,
    max_steps: int | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    seed: int = 0,
    val_every_n_steps: int | None = None,
    log: LogFunction | None = None,
    log_every_n_steps: int = 50,
    checkpoint_path: str | os.PathLike[str] | None = None,
    checkpoint_every_n_steps: int | None = None,
    resume: bool = True,
) -> Fitted:
    """Train a JAX module with its own steps, optimizer and hooks.

    Parameters are born on their shards. Steps are compiled by :class:`~xlatrain.step.engine.Engine`; one runs ahead of the
    values that are read. A resumed run goes on bit for bit with the batch after the last one that the checkpoint has seen.

    ::

        fitted = xlatrain.fit(Classifier, batches, max_epochs=2, checkpoint_path="run.ckpt", log=print)
        fitted.module, fitted.metrics["loss"]

    Args:
        make_module: ``nnx.Rngs -> JaxModule``: the class, or a lambda with its arguments. Traced.
        train_batches: this process's rows. On resumption the batches of the epoch that were trained on are drawn and dropped.
        val_batches: for ``validation_step``.
        max_epochs: end after so many epochs.
        max_steps: end after so many optimizer steps, those before a resumption included.
        mesh: default: all devices, data parallel.
        rules: how parameters are split.
        seed: for ``nnx.Rngs``.
        val_every_n_steps: validate after every so many steps; None: at the end of each epoch.
        log: is given what ``self.log`` was given, on process 0.
        log_every_n_steps: how often values of single steps are given to ``log``.
        checkpoint_path: one checkpoint, replaced atomically by the next.
        checkpoint_every_n_steps: save after every so many steps; None: at the end of each epoch. The end of the run is saved
            in any case.
        resume: go on from ``checkpoint_path``, where there is one; False starts anew.

    Raises:
        TypeError: ``make_module`` makes no JaxModule, or its module overrides what only a Trainer calls, by name.
        ValueError: an argument; or an epoch without batches.
        ImpureFunctionError: a step draws from, or depends on, something else than the module and its batch.
        StructureError: a step changes a plain attribute.
        CheckpointMismatchError: the checkpoint is of another module or optimizer.
    """
    if max_epochs is None and max_steps is None:
        raise ValueError("xlatrain.fit: give max_epochs, max_steps or both; without one it would never end")
    numbers = {
        "max_epochs": max_epochs,
        "max_steps": max_steps,
        "val_every_n_steps": val_every_n_steps,
        "log_every_n_steps": log_every_n_steps,
        "checkpoint_every_n_steps": checkpoint_every_n_steps,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"xlatrain.fit({name}={number!r}): expected 1 or more, or None")
    if checkpoint_every_n_steps is not None and checkpoint_path is None:
        raise ValueError("xlatrain.fit(checkpoint_every_n_steps=…) needs checkpoint_path, where to save")
    if val_every_n_steps is not None and val_batches is None:
        raise ValueError("xlatrain.fit(val_every_n_steps=…) needs val_batches")
    run = _Run(make_module, mesh or make_mesh({"data": -1}), rules)
    if val_batches is not None and not has(run.kind, "validation_step"):
        raise ValueError(f"xlatrain.fit(val_batches=…): {run.kind.__name__} has no validation_step")
    run.train_batches, run.val_batches = train_batches, val_batches
    run.max_epochs, run.max_steps = max_epochs, max_steps
    run.val_every, run.log_every, run.log_to = val_every_n_steps, log_every_n_steps, log
    run.path, run.save_every = checkpoint_path, checkpoint_every_n_steps
    run.begin(seed, resume=resume)
    run.train()
    return Fitted(run.current_module(), run.state, run.metrics, run.global_step, run.current_epoch)


class _Run:
    """A run of :func:`fit`, whose arguments it has; what ``self.log``, ``self.global_step`` and the like ask in hooks.

    Attributes:
        global_step: optimizer steps taken.
        current_epoch: the epoch, from 0.
        batch_idx: batches of the epoch that were trained on.
    """

    train_batches: Batches
    val_batches: Batches | None
    max_epochs: int | None
    max_steps: int | None
    val_every: int | None
    log_every: int
    log_to: LogFunction | None
    path: str | os.PathLike[str] | None
    save_every: int | None
    state: TrainState

    def __init__(self, make_module: Callable[[nnx.Rngs], JaxModule], mesh: Mesh, rules: ShardingRules | None) -> None:
        self.global_step = self.current_epoch = self.batch_idx = 0
        self.metrics: dict[str, float] = {}
        self._step_values: dict[str, float] = {}
        self._train_values = EpochValues()
        self._val_values: EpochValues | None = None
        self._unread: tuple[LoggedArrays, int] | None = None
        self._hook_name, self._rows = "", 1
        self._saved_at: tuple[int, int] | None = None
        self._checked: set[Hashable] = set()
        self._untold: set[str] = set()  # logged with ``logger=False``
        with jax.set_mesh(mesh):
            shapes = module_shapes(make_module)
            self.kind = type(shapes)
            attach(shapes, self)
            optimizer = optimizer_of(shapes)
        self.engine = Engine(make_module, optimizer, mesh=mesh, rules=rules, trainable=self.kind.trainable)

    @property
    def trainer(self) -> Any:
        """Raises:
        RuntimeError: there is none.
        """
        raise RuntimeError(
            f"{self.kind.__name__}.trainer: xlatrain.fit has no Trainer. Pass values such as the number of steps to the module's "
            "__init__, or use torch_compat.Trainer"
        )

    def begin(self, seed: int, *, resume: bool) -> None:
        """Make the state, or read the checkpoint."""
        found = None
        if resume and self.path is not None and checkpoint.is_checkpoint(self.path):
            found = checkpoint.open_checkpoint(self.path)
        if found is None:
            self.state = self.engine.init(seed)
        else:
            if _FILE not in found.files:
                raise ValueError(f"{os.fspath(self.path or '')} was not saved by xlatrain.fit: it has no {_FILE}")
            progress = json.loads(found.files[_FILE])
            self.state = found.restore(self.engine.abstract_state)
            self.global_step, self.current_epoch, self.batch_idx = progress["step"], progress["epoch"], progress["batch"]
            self.metrics, self._train_values = progress["metrics"], EpochValues(progress["epoch_values"])
            self._saved_at = (self.current_epoch, self.batch_idx)
        self._module = self.engine.module(self.state)
        self._structure = self._graphdef()
        attach(self._module, self)
        self._compile()
        if found is not None:
            self._hook("on_load_checkpoint", progress["module"])

    def train(self) -> None:
        """Train to the end."""
        if self._is_done():
            return
        self._hook("on_fit_start")
        self._hook("on_train_start")
        while not self._is_done():
            self._train_epoch()
        self._hook("on_train_end")
        self._hook("on_fit_end")
        if self.path is not None:
            checkpoint.wait_for_saves()

    def current_module(self) -> Any:
        """The module with the present values."""
        self.engine.write(self._module, self.state)
        return self._module

    def log(self, name: str, value: Any, **options: Any) -> None:
        """``self.log`` in a hook."""
        if not self._hook_name.startswith(("on_train_", "on_validation_")) or self._hook_name in (
            "on_train_start",
            "on_train_end",
        ):
            raise RuntimeError(
                f"self.log({name!r}) in {self._hook_name or 'no hook'}: log in steps, or in hooks of epochs and batches"
            )
        found = log_options(name, options, on_step=self._hook_name.startswith("on_train_batch"))
        self._take(found, float(value), self._rows if "batch" in self._hook_name.split("_") else 1, self._step_values)

    # -- one epoch -------------------------------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        """The epoch, from the batch on where a checkpoint left it."""
        if self.batch_idx == 0:
            self._train_values = EpochValues()
            self._hook("on_train_epoch_start")
        drawn: deque[Any] = deque()
        placed = self.engine.place(self._counted(self.train_batches, drawn, is_training=True))
        ended, empty = True, self.batch_idx == 0
        for batch in placed:
            empty = False
            if not self._train_batch(batch, drawn.popleft()):
                break
            if self.global_step == self.max_steps:
                ended = next(placed, None) is None
                break
        if empty:
            raise ValueError(
                f"xlatrain.fit: train_batches gave no batch in epoch {self.current_epoch}; an iterator ends for good: give "
                "a list, a loader that begins anew, or a function of the epoch's number"
            )
        if ended and self.val_every is None:
            self._validate()
        if not ended:
            self._save()  # before the hook: a longer run goes on inside of this epoch
        self._read()
        self._hook("on_train_epoch_end")
        self._report(self._train_values.values())
        if ended:
            self.current_epoch, self.batch_idx = self.current_epoch + 1, 0
            if self.save_every is None or self._is_done():
                self._save()

    def _train_batch(self, batch: Any, host: Any) -> bool:
        """Train on a batch, with its hooks; tells whether the epoch goes on."""
        self._step_values, self._rows = {}, batch.rows.size
        if self._hook("on_train_batch_start", host, self.batch_idx) == -1:
            return False
        self._check("training_step", self._loss, batch)
        self.state, output = self._train_step(self.state, batch)
        self._read()  # those of the step before, while this one runs
        logged, rest = output.aux
        self._unread = (logged, self._rows)
        index = self.batch_idx
        self.global_step, self.batch_idx = self.global_step + 1, index + 1
        self._hook("on_train_batch_end", {**(rest or {}), "loss": output.loss}, host, index)
        if self.global_step % self.log_every == 0:
            self._read(self._step_values)
            self._report(self._step_values)
        if self.val_every is not None and self.global_step % self.val_every == 0:
            self._validate()
        if self.save_every is not None and self.global_step % self.save_every == 0:
            self._save()
        return True

    def _validate(self) -> None:
        if self.val_batches is None:
            return
        self._read()
        self._val_values = EpochValues()
        self._hook("on_validation_start")
        self._hook("on_validation_epoch_start")
        drawn: deque[Any] = deque()
        for index, batch in enumerate(self.engine.place(self._counted(self.val_batches, drawn, is_training=False))):
            host, self._rows = drawn.popleft(), batch.rows.size
            self._hook("on_validation_batch_start", host, index, 0)
            self._check("validation_step", self._evaluate, batch)
            logged, output, changed = self._val_step(self.state, batch)
            self._read()
            self._unread = (logged, self._rows)
            if changed:
                self.state = self.engine.with_buffers(self.state, changed)
            self._hook("on_validation_batch_end", output, host, index, 0)
        self._read()
        self._hook("on_validation_epoch_end")
        self._report(self._val_values.values())
        self._hook("on_validation_end")
        self._val_values = None

    def _counted(self, batches: Batches, drawn: deque[Any], *, is_training: bool) -> Iterator[Any]:
        """The batches that are left, each with the counters of its step; ``drawn`` gets them as they came."""
        start, step, epoch = self.batch_idx if is_training else 0, self.global_step, self.current_epoch
        for index, batch in enumerate(batches(epoch) if callable(batches) else batches):
            if index < start:
                continue
            drawn.append(batch)
            ahead = step + index - start if is_training else step
            counters = {"batch_idx": index, "global_step": ahead, "current_epoch": epoch}
            yield batch, {name: np.int32(value) for name, value in counters.items()}

    # -- programs --------------------------------------------------------------------------------------------------------

    def _compile(self) -> None:
        """Make the steps for the module's present plain attributes."""
        self._checked.clear()
        self._train_step = self.engine.compile_train_step(self._loss)
        self._val_step = self.engine.compile_eval_step(self._evaluate)

    def _loss(self, module: Any, placed: Any) -> Any:
        found = self._traced(module, "training_step", placed)
        return found.loss, (LoggedArrays.of(found.logged, on_step=True), found.output)

    def _evaluate(self, module: Any, placed: Any) -> Any:
        module.eval()
        buffers = self.engine.buffers_of(module)
        found = self._traced(module, "validation_step", placed)
        logged = LoggedArrays.of(found.logged, on_step=False)
        if steps := [one.name for one in logged.options if one.on_step]:
            raise ValueError(f"self.log({steps[0]!r}, on_step=True) in validation_step: xlatrain.fit logs validation by epoch")
        changed = {name: value for name, value in self.engine.buffers_of(module).items() if value is not buffers[name]}
        return logged, found.output, changed

    def _traced(self, module: Any, name: str, placed: Any) -> TracedStep:
        """Raises:
        StructureError: the step changes what is no variable.
        """
        before, attributes = nnx.graphdef(module), PlainAttributes(module)
        found = trace_step(module, name, *placed)
        attributes.check_contents()
        if nnx.graphdef(module) != before:
            raise StructureError(
                f"{where(module, name)} changes plain attributes or adds variables, and runs without its Python once it is "
                "traced: make variables in __init__ and write into them, or change attributes in a hook"
            )
        return found

    def _check(self, name: str, function: Callable[[Any, Any], Any], batch: GlobalBatch) -> None:
        """Trace a step for batches of new shapes twice.

        Raises:
            ImpureFunctionError: it does not compute the same both times.
        """
        leaves, structure = jax.tree.flatten(batch.tree)
        specs = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        key = (name, structure, batch.cut, specs)
        if key in self._checked:
            return

        def of_arrays(params: Any, buffers: Any, tree: Any) -> Any:
            state = dataclasses.replace(self.state, params=params, buffers=buffers)
            return function(self.engine.module(state), batch.cut(tree))

        abstract = self.engine.abstract_state
        with jax.set_mesh(self.engine.mesh):
            check_pure(of_arrays, (abstract.params, abstract.buffers, jax.tree.unflatten(structure, specs)), self.kind.__name__)
        self._checked.add(key)

    # -- hooks and values ------------------------------------------------------------------------------------------------

    def _hook(self, name: str, *args: Any) -> Any:
        """Call a hook, if there is one: it sees the present values, and what it writes into variables counts."""
        if not has(self.kind, name):
            return None
        self.engine.write(self._module, self.state)
        self._hook_name = name
        try:
            found = getattr(self._module, name)(*args[: accepted(self.kind, name)])
        finally:
            self._hook_name = ""
        self.state = self.engine.read(self._module, self.state)
        if (now := self._graphdef()) != self._structure:
            self._structure, self.engine = now, self.engine.with_structure(now)
            self._compile()
        return found

    def _graphdef(self) -> Any:
        return nnx.split(self._module, self.kind.trainable, ...)[0]

    def _read(self, step_values: dict[str, float] | None = None) -> None:
        """Read what the last step logged; waits for it."""
        if self._unread is None:
            return
        (logged, rows), self._unread = self._unread, None
        for options, value in zip(logged.options, jax.device_get(logged.values), strict=True):
            self._take(options, float(value), rows, step_values)

    def _take(self, options: Any, value: float, rows: int, step_values: dict[str, float] | None) -> None:
        if not options.is_told:
            self._untold |= {options.step_name, options.epoch_name}
        if options.on_step:
            self.metrics[options.step_name] = value
            if step_values is not None:
                step_values[options.step_name] = value
        if options.on_epoch:
            (self._train_values if self._val_values is None else self._val_values).add(options, value, rows)

    def _report(self, values: Mapping[str, float]) -> None:
        self.metrics.update(values)
        told = {name: value for name, value in values.items() if name not in self._untold}
        if told and self.log_to is not None and jax.process_index() == 0:
            self.log_to(self.global_step, told)

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        reached = self.max_steps is not None and self.global_step >= self.max_steps
        return reached or (self.max_epochs is not None and self.current_epoch >= self.max_epochs)

    def _save(self) -> None:
        position = (self.current_epoch, self.batch_idx)
        if self.path is None or position == self._saved_at:
            return
        self._read()
        own: dict[str, Any] = {}
        self._hook("on_save_checkpoint", own)
        progress = {
            "step": self.global_step,
            "epoch": self.current_epoch,
            "batch": self.batch_idx,
            "metrics": self.metrics,
            "epoch_values": self._train_values.saved(),
            "module": own,
        }
        try:
            text = json.dumps(progress)
        except TypeError as error:
            raise TypeError(
                f"{where(self._module, 'on_save_checkpoint')}: {error}; expected values that JSON has. Arrays belong in variables"
            ) from error
        checkpoint.save(self.path, self.state, {_FILE: text.encode()}, facts={"step": self.global_step})
        self._saved_at = position
