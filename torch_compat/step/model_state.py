"""A torch module whose parameters and buffers live on a mesh."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

from torch_compat.step.guards.module_structure import changes, note_change
from torch_compat.step.guards.module_tensors import ModuleTensors
from torch_compat.step.host_gradients import HostGradients
from torch_compat.step.materialize import check_dense, detach_sources, place_tensors
from torch_compat.step.metrics.calls import metric_modules
from torch_compat.step.model_gradients import ModelGradients
from torch_compat.step.optimizers.init_program import init_program
from torch_compat.utilities.host_arrays import host_value, is_here, place, to_torch
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.bridge.tensors.host_copies import is_alone
from xlatrain.bridge.tensors.lazy import LazyTensor, become_lazy
from xlatrain.bridge.tensors.live import LiveTensors, live_array
from xlatrain.bridge.tensors.strides import Strides, strides_of
from xlatrain.cluster import distributed
from xlatrain.host.host_memory import available_host_memory
from xlatrain.mesh.mesh import is_multiprocess
from xlatrain.mesh.pipelining import Pipelining
from xlatrain.mesh.sharding import ShardingRules, like_parameters, replicated
from xlatrain.step.loss_scale import LossScaleState
from xlatrain.step.offload import check_host_memory, state_places
from xlatrain.step.stacking import Stacking, member, split_state, stack_state
from xlatrain.step.state import TrainState
from xlatrain.step.step import state_shardings

_MOST_BESIDE = 256  # tensors of a run that are taken in
_READ_BEFORE = 1 << 16  # bytes of a parameter or buffer whose value is read before a step that asks for it


class ModelState:
    """Owns the arrays of a module during a run.

    The module's ``nn.Parameter`` objects stay what they are and become live views of the arrays
    (:mod:`xlatrain.bridge.tensors.live`); :meth:`release` gives them ordinary host tensors again.

    Args:
        module: parameters and buffers are read, or made, once, and placed.
        mesh: where they go.
        rules: how parameters are split.
        seed: of the random streams of compiled steps.
        beside: name → a parameter of an optimizer that is no parameter of the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: Mesh,
        rules: ShardingRules,
        seed: int,
        beside: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.params = {**dict(module.named_parameters()), **beside}
        metrics = metric_modules(module)  # their buffers are no part of the programs
        skipped = {id(b) for child in module.modules() if id(child) in metrics for b in child.buffers(recurse=False)}
        self.buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in skipped}
        self._names = {id(t): name for name, t in {**self.params, **self.buffers}.items()}
        check_dense({**self.params, **self.buffers})
        self.param_shardings = rules.shardings(self.params, mesh)
        self.pipelining = Pipelining.of_mesh(mesh, rules.rounds, rules.microbatches)
        self.offloads = rules.offload == "optimizer"
        if self.offloads:
            check_host_memory(mesh, "offload='optimizer'")
        self.state_places = state_places(rules, self.param_shardings)
        self._whole = replicated(mesh)
        # The default device alone needs no shardings, and arrays without any are dispatched faster.
        self._unsharded = mesh.devices.size == 1 and mesh.devices.flat[0] == jax.devices()[0] and not self.offloads
        self.multiprocess = is_multiprocess(mesh)
        self.is_released = False  # the host has the values, from where they do not come back
        self._stacking: Stacking | None = None
        self._read_before: dict[str, torch.Tensor] = {}
        self.state = self._initial_state(seed)
        self.shardings: TrainState | None = None
        self.strides: dict[str, Strides] = {}  # of parameters and buffers that are not contiguous
        self.gradients = ModelGradients(self)
        self.live = LiveTensors(self._read, self.gradients.read, self.gradients.write, self.write, self.array)
        tensors = {**self.params, **self.buffers}
        self.live.adopt(tensors, storageless=self._take_over(tensors))
        self._note_strides(tensors)
        self.beside: dict[str, torch.Tensor] = {}  # buffers that were taken in
        self._tensors_there = ModuleTensors(module)
        self._others: list[str] = []
        self._changes = changes()
        self._unlike: str | None = None  # why a tensor that was assigned cannot take its place
        self.shapes_changed = 0  # how often a buffer got another shape
        self._held_by_us: dict[str, int] = {}  # references to buffers that we have made
        self._host_gradients = HostGradients(self.params.values(), self.gradients.add)
        if self.multiprocess:
            self.live.advance()  # the values on the mesh are process 0's: every host reads these from now on

    def _take_over(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """The tensors' values are on the mesh; gives the names of those that have none on the host."""
        return detach_sources(tensors)

    def _initial_state(self, seed: int) -> TrainState:
        params = self._born(self.params, self.param_shardings)
        buffers = self._born(self.buffers, dict.fromkeys(self.buffers, self._whole))
        key = np.asarray([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
        return TrainState(
            params=params,
            buffers=buffers,
            opt_state={},
            accumulated={},
            draws=self._place(np.zeros((), np.int32), self._whole),
            key=self._place(key, self._whole),
        )

    def _place(self, host: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        return jax.device_put(host) if self._unsharded else place(host, sharding)

    def take_in(self, tensor: torch.Tensor) -> bool:
        """Put a tensor that steps write to, and that no module of the tree has, on the mesh as buffers are.

        False where that cannot be: others may see its memory, or it is trained, or on the mesh already.
        """
        if self.multiprocess or not is_alone(tensor) or self.name_of(tensor) is not None or len(self.beside) == _MOST_BESIDE:
            return False
        name = f"a tensor beside the module ({len(self.beside) + 1})"
        self.beside[name] = self.buffers[name] = tensor
        self._names[id(tensor)] = name
        born = self._born({name: tensor}, {name: self._whole})
        self.state = replace(self.state, buffers={**self.state.buffers, **born})
        self._note_strides([name])
        if self.shardings is not None:
            self.shardings = replace(self.shardings, buffers={**self.shardings.buffers, name: self._whole})
        self.live.adopt({name: tensor}, storageless=self._take_over({name: tensor}))
        return True

    def _born(self, tensors: Mapping[str, torch.Tensor], shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        places: Mapping[str, Any] = dict.fromkeys(tensors) if self._unsharded else shardings
        return place_tensors(tensors, places, multiprocess=self.multiprocess)

    def add_optimizer(self, init: Callable[[dict[str, jax.Array]], Any]) -> None:
        """Make the optimizer's state in one program: ``init(params)``, split like the parameters that it belongs to."""
        params = self.state.params
        if self._unsharded:
            self.state = replace(self.state, opt_state=init_program(init, None, self.mesh)(params))
            return
        shardings = like_parameters(jax.eval_shape(init, params), params, self.state_places, self.mesh)
        self.state = replace(self.state, opt_state=init_program(init, shardings, self.mesh)(params))
        self.shardings = state_shardings(self.state, self.param_shardings, shardings, self.mesh)

    def drop_optimizer(self) -> None:
        """Drop the optimizer's state here: it belongs to the exported tensors, and each array goes when it has been read."""
        self.state = replace(self.state, opt_state={})

    def scale_loss(self, loss_scale: LossScaleState) -> None:
        """Start dynamic loss scaling, or continue it, with this state."""
        placed = jax.tree.map(lambda leaf: self._place(np.asarray(leaf), self._whole), loss_scale)
        self.state = replace(self.state, loss_scale=placed)
        if self.shardings is not None:
            self.shardings = replace(self.shardings, loss_scale=jax.tree.map(lambda _: self._whole, placed))

    def load_optimizer(self, load: Callable[[dict[str, jax.Array]], Any]) -> None:
        """Replace the optimizer's state by ``load(params)``, whose structure may depend on what was saved."""
        loaded = load(self.state.params)
        if self._unsharded:
            self.state = replace(self.state, opt_state=jax.tree.map(jax.device_put, loaded))
            return
        assert self.shardings is not None
        shardings = like_parameters(loaded, self.state.params, self.state_places, self.mesh)
        self.state = replace(self.state, opt_state=jax.tree.map(jax.device_put, loaded, shardings))
        self.shardings = replace(self.shardings, opt_state=shardings)

    def set_streams(self, key: list[int], draws: int) -> None:
        """Continue the random streams at a saved position."""
        self.state = replace(
            self.state,
            key=self._place(np.asarray(key, np.uint32), self._whole),
            draws=self._place(np.asarray(draws, np.int32), self._whole),
        )

    @property
    def state(self) -> TrainState:
        """The training state by parameter name. Where the last program left layers stacked, they are cut apart first."""
        if self._stacking is not None:
            self.state = split_state(self._state)
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state, self._stacking = state, None
        self._read_before.clear()

    @property
    def raw_state(self) -> TrainState:
        """The state as the last program left it, maybe with layers stacked; nothing is computed."""
        return self._state

    @raw_state.setter
    def raw_state(self, state: TrainState) -> None:
        self._state = state

    def stacked_state(self, stacking: Stacking | None) -> TrainState:
        """The state as a program takes it; what the program returns replaces it, see :meth:`advance`."""
        if stacking is None:
            return self.state
        if stacking is not self._stacking and stacking != self._stacking:
            self._state, self._stacking = stack_state(self.state, stacking), stacking
        return self._state

    def may_stack(self, names: Sequence[str]) -> bool:
        """Whether these parameters can be one stack: they are alike, and no gradients of theirs are kept."""
        params = [self.params[name] for name in names]
        alike = {(p.shape, p.dtype, p.requires_grad, self.param_shardings[n]) for n, p in zip(names, params, strict=True)}
        return len(alike) == 1 and not self.gradients.are_kept and not (self.offloads and self.multiprocess)

    def advance(self, state: TrainState, stacking: Stacking | None = None, changed: Collection[str] | None = None) -> None:
        """Replace the state by what a program returned, which may be stacked.

        Args:
            changed: the parameters and buffers that have other values now; None: any may have.
        """
        self._state, self._stacking = state, stacking
        if self._read_before:
            for name in tuple(self._read_before) if changed is None else self._read_before.keys() & changed:
                del self._read_before[name]
        self.gradients.shown = None
        self.live.advance()

    def put_back(self, state: TrainState, stacking: Stacking | None = None) -> None:
        """The state as it was before a program that took nothing over: other arrays with the same values."""
        self._state, self._stacking = state, stacking

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of a name, which the user has."""
        return self.params[name] if name in self.params else self.buffers[name]

    def push_writes(self) -> None:
        """Take over what user code wrote into parameters, buffers and gradients since the last step."""
        self.push_values()
        if self.gradients.shown is not None:
            self.gradients.push()

    def push_values(self) -> None:
        """:meth:`push_writes` without the gradients, which in the hooks of a step are still to be used."""
        if self._tensors_there.changed():
            self.find_tensors()
        self._note_strides(self.live.exposed)
        for name, host in self.live.written().items():
            self.write(name, host)

    def _note_strides(self, names: Iterable[str]) -> None:
        """Look at the strides of parameters and buffers, in which user code may have changed them."""
        for name in names:
            now = strides_of(self.params[name] if name in self.params else self.buffers[name])
            if self.strides.get(name) != now:
                self.live.forms_changed += 1
                self.strides.pop(name, None)
                if now is not None:
                    self.strides[name] = now

    def lay_out(self, name: str, strides: Strides | None) -> None:
        """Give a parameter or buffer the strides that a step has left it with."""
        self.live.lay_out(name, strides)
        self._note_strides([name])

    def find_tensors(self) -> None:
        """Take over buffers that were assigned anew; those of another kind stay on the host, see :meth:`check_tensors`."""
        self._tensors_there.refresh()
        note_change()  # a step may look whether there is a buffer
        self._changes = changes()
        self._others = [name for name, param in self.module.named_parameters() if self.params.get(name) is not param]
        self._unlike = None
        for name, tensor in dict(self._tensors_there.others({**self.params, **self.buffers})).items():
            if problem := self._why_not(name, tensor):
                self._unlike = self._unlike or problem
                continue
            assert tensor is not None
            values, before = as_numpy(tensor.detach()), self.buffers[name]
            self.live.replace(name, tensor)
            self._put(name, tensor)
            self._note_strides([name])
            if tensor.shape == before.shape:
                self.write(name, values)
            else:
                self.state = replace(self.state, buffers={**self.state.buffers, name: self._place(np.array(values), self._whole)})
                self.shapes_changed += 1

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._names.pop(id(self.buffers[name]), None)
        self.buffers[name] = tensor
        self._names[id(tensor)] = name

    def part(self, assigned: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The buffers to which a step is about to assign other tensors, whose own somebody else may hold and look at later.

        Returns:
            By name the arrays that these keep; None where the host has their values.
        """
        parted = {}
        for name, shape in assigned.items():
            held = sys.getrefcount(self.buffers[name]) > self._held_by_us.get(name, 0) or self.live.is_shown(name)
            if not held and self.buffers[name].shape == shape:
                continue
            if self.multiprocess or self.live.is_current(name) or not self.live.is_ordinary(name):
                self.live.leave(name)
                parted[name] = None
            else:
                parted[name] = jnp.copy(self.array(name))  # that itself is donated to the step
        return parted

    def put_assigned(self, parted: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Put new tensors in the place of buffers that have parted from theirs."""
        for name, array in parted.items():
            self._put_new(name, shapes[name], array)
        if parted:
            self._tensors_there.refresh()
        for name in parted:
            self._held_by_us[name] = sys.getrefcount(self.buffers[name])

    def _put_new(self, name: str, shape: tuple[int, ...], array: Any) -> None:
        path, _, key = name.rpartition(".")
        before = self.buffers[name]
        new = torch.empty(shape, dtype=before.dtype)
        self.live.put_unread(name, new)
        if array is not None:
            become_lazy(before, functools.partial(to_torch, array, before.dtype))
        self._put(name, new)
        self.module.get_submodule(path)._buffers[key] = new
        self._note_strides([name])
        self.shapes_changed += before.shape != new.shape

    def buffer_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the module's buffers, in order."""
        return tuple(tuple(one.shape) for name, one in self.buffers.items() if name not in self.beside)

    def other_parameters(self) -> list[str]:
        """The names under which the module has other parameters than the mesh: new ones, or new under this name."""
        if self._changes != changes() or self._tensors_there.changed():
            self.find_tensors()
        return self._others

    def check_tensors(self) -> None:
        """A step is about to run: it must have the tensors that the module has. A step that has begun ends with its own.

        Raises:
            CaptureError: there is another parameter under a name, or a buffer of another kind.
        """
        if self._unlike is not None:
            raise CaptureError(self._unlike)

    def _why_not(self, name: str, tensor: torch.Tensor | None) -> str | None:
        """Why ``tensor`` cannot take the place of the parameter or buffer ``name``; None if it can."""
        if name in self.params:
            return (
                f"self.{name} is another parameter than when the run began: the optimizer has the old one and leaves the new one "
                "as it is. Write new values into the parameter (with torch.no_grad(): p.copy_(values))"
            )
        before = self.buffers[name]
        if tensor is None:
            return f"the buffer self.{name} is None, but was a tensor when the run began"
        if tensor.dtype != before.dtype or (self.multiprocess and tensor.shape != before.shape):
            return (
                f"the buffer self.{name} was assigned a tensor {tuple(tensor.shape)} of {tensor.dtype}, but was "
                f"{tuple(before.shape)} of {before.dtype} when the run began: a compiled step has one kind of each"
                f"{', and on several processes one shape' if self.multiprocess else ''}. Assign a tensor like the one before"
            )
        if type(tensor) not in (torch.Tensor, LazyTensor) or live_array(tensor) is not None or self.name_of(tensor):
            return f"the buffer self.{name} was assigned a {type(tensor).__name__} that is also something else: assign a clone()"
        return None

    def replicate(self, tree: Any) -> Any:
        """A pytree of host arrays, whole on every device of the mesh."""
        return jax.tree.map(lambda leaf: self._place(np.asarray(leaf), self._whole), tree)

    def write(self, name: str, host: np.ndarray) -> None:
        """Replace the value of one parameter or buffer; it keeps its dtype and sharding.

        Args:
            host: an array of its global shape, the same on every process.

        Raises:
            ValueError: another shape.
        """
        params = name in self.state.params
        current = (self.state.params if params else self.state.buffers)[name]
        if tuple(host.shape) != tuple(current.shape):
            raise ValueError(f"{name!r} has shape {tuple(current.shape)} on the mesh, but was given {tuple(host.shape)}")
        array = self._place(np.array(host).astype(current.dtype), current.sharding)
        if params:
            self.state = replace(self.state, params={**self.state.params, name: array})
        else:
            self.state = replace(self.state, buffers={**self.state.buffers, name: array})

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name under which ``tensor`` is a parameter or buffer here, or None."""
        return self._names.get(id(tensor))

    def array(self, name: str) -> jax.Array:
        """The current array of a parameter or buffer, cut out of its stack if it is in one.

        Raises:
            KeyError: there is none of that name.
        """
        if name in self.buffers:
            return self._state.buffers[name]
        found = self._state.params.get(name)
        return member(self._state.params, name) if found is None else found

    def value_before_step(self, name: str) -> torch.Tensor | None:
        """The value of a buffer or small parameter, read from the mesh where it may have changed since it was read last.

        None for what is large, or not on this process. The caller does not change it.
        """
        found = self._read_before.get(name)
        if found is None:
            array = self.array(name)
            if array.nbytes > _READ_BEFORE or not is_here(array):
                return None
            dtype = (self.buffers if name in self.buffers else self.params)[name].dtype
            found = self._read_before[name] = to_torch(array, dtype)
        return found

    def _read(self, name: str) -> np.ndarray:
        return host_value(self.array(name), repr(name))

    def of_trained(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients, by name, whose parameter requires one at this moment."""
        return {name: grad for name, grad in grads.items() if self.params[name].requires_grad}

    def requires_grad(self) -> tuple[bool, ...]:
        """The parameters' flags, in order."""
        return tuple(p.requires_grad for p in self.params.values())

    def release(self, *, to_host: bool, failed: bool = False) -> list[str]:
        """Give the module its ordinary parameters back, with all values on the host; or, if not ``to_host``, leave them here.

        Then the module's tensors are read from the mesh, one at a time, and another run takes them over. The names of those
        whose values are lost are given, which only a step that ``failed`` can cause.
        """
        self._host_gradients.stop()
        if to_host:
            lost, self.is_released = self.live.release(failed=failed), True
            # Reference cycles keep this until garbage is collected, which arrays are too large to wait for.
            self.state = replace(self._state, params={}, buffers={}, opt_state={}, accumulated={})
            self.gradients.shown = None
            return lost
        self.state = replace(self.state, opt_state={}, accumulated={})
        return []

    def gradient_bytes(self) -> int:
        """Bytes of all gradients, unsharded."""
        return sum(param.nbytes for param in self.params.values() if param.requires_grad)

    def fits_host(self, *, failed: bool = False) -> bool:
        """Whether each process can have the whole module and its optimizer's state; always if it came from the host.

        On several processes all must ask, unless a run ``failed``. That may be on some of them only, and the others do not come
        to read what is split over processes: it stays on the mesh, and this process ends with its error.
        """
        if failed and self.multiprocess and not all(map(is_here, jax.tree.leaves(self._state))):
            return False
        if self.live.storageless_bytes == 0:
            return True
        if failed and self.multiprocess:
            return False
        state = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.opt_state))
        fits = self.live.storageless_bytes + state <= available_host_memory()
        return min(distributed.all_gather_object(fits)) if self.multiprocess else fits
