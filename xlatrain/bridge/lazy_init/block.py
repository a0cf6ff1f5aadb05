"""The with-block in which modules are made without values."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from xlatrain.bridge.lazy_init.absorbing import Absorber, PutAway
from xlatrain.bridge.lazy_init.recorder import recording
from xlatrain.bridge.lazy_init.slices import Slice
from xlatrain.bridge.lazy_init.tape import TORCHS_NUMBERS, Tape, operand_of
from xlatrain.bridge.lazy_init.tensors import defer_all, settle

_ACTIVE: list[Tape] = []


@contextlib.contextmanager
def deferred_init(
    seed: int | Callable[[], int] | None = None, put_away: PutAway | None = None, *, torchs_numbers: int = TORCHS_NUMBERS
) -> Iterator[None]:
    """Make modules without spending memory: ``with deferred_init(): model = Model()``.

    Inside, the user's constructors run as they are, on CPU tensors that have everything but values. Afterwards a parameter gets
    its values when somebody needs them: on the host when it is read, on the shards when the module is placed on a mesh. Values
    are the same on any mesh and any number of processes. They are torch's, and torch's generator is afterwards where it would
    be without the block, where these are up to a gigabyte of random numbers. Where there are more, they follow the distribution
    that torch draws from, are decided by the seed and the module, and are drawn where they will lie. A block inside another
    one is part of it.

    What an inner constructor reads (``.item()``, a branch) is computed there and then. What shares memory with numpy, is
    drawn from a generator of the user's own, or comes from a file, has its values at once.

    Args:
        seed: of what is not torch's: a number, or a function that gives one, called when such an op comes up. By default it is
            made of the state of torch's generator, so that ``torch.manual_seed`` and ``seed_everything`` decide. It must be the
            same on every process.
        put_away: where large parameters go that the constructor made with values, each when the next one is registered, so that
            they are never all on the host. By default they stay there.
        torchs_numbers: bytes of random numbers up to which they are torch's. Each process draws them all, twice.
    """
    if _ACTIVE:
        yield
        return
    tape = Tape(draw_seed if seed is None else seed, torchs_numbers)
    absorber = None if put_away is None else Absorber(tape, put_away)
    _ACTIVE.append(tape)
    try:
        with _modules_made(absorber) as made, recording(tape, settle):
            yield
        _name_draws(made)
    finally:
        if tape.kept:
            defer_all()
        tape.end()
        _ACTIVE.pop()


def draw_seed() -> int:
    """A seed made of the state of torch's generator, which stays as it is."""
    return int.from_bytes(hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).digest()[:7])


@contextlib.contextmanager
def _modules_made(absorber: Absorber | None) -> Iterator[list[torch.nn.Module]]:
    """The modules that get a parameter or a submodule inside the block, each once, in order."""
    made: dict[torch.nn.Module, None] = {}

    def note_part(module: torch.nn.Module, name: str, part: object) -> None:
        made[module] = None
        if isinstance(part, torch.nn.Module):
            made[part] = None
        elif absorber is not None and isinstance(part, torch.Tensor):
            absorber.register(part)

    found: list[torch.nn.Module] = []
    handles = [register_module_parameter_registration_hook(note_part), register_module_module_registration_hook(note_part)]
    try:
        yield found
        if absorber is not None:
            absorber.finish()
        found.extend(made)
    finally:
        for handle in handles:
            handle.remove()


def _name_draws(made: list[torch.nn.Module]) -> None:
    """Name each random op by the first parameter or buffer that depends on it."""
    parts = {id(child) for module in made for child in module.children()}
    roots = [module for module in made if id(module) not in parts]
    for number, root in enumerate(roots):
        prefix = f"{number}:" if number else ""
        for path, tensor in [*root.named_parameters(), *root.named_buffers()]:
            operand = operand_of(tensor)
            nodes = [] if operand is None else Slice.from_target(operand).random
            for i, node in enumerate(nodes):
                if (draw := node.draw) is not None and draw.name is None:
                    draw.name = f"{prefix}{path} {i}"
