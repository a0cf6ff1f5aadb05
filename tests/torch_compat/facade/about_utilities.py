"""``lightning.pytorch.utilities`` and ``lightning.fabric.utilities``, function by function."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import random
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import lightning.fabric.utilities.cloud_io as cloud_io
import lightning.fabric.utilities.seed as seeding
import lightning.pytorch as pl
import numpy as np
import torch
from answering import ask, ask_each, attempt
from lightning.fabric.utilities import AttributeDict, LightningEnum, move_data_to_device, rank_zero
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, convert_to_tensors
from lightning.fabric.utilities.data import has_iterable_dataset, has_len, sized_len, suggested_max_num_workers
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import LightningDeprecationWarning
from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException
from lightning.fabric.utilities.throughput import Throughput
from lightning.fabric.utilities.types import Optimizable, Steppable
from lightning.fabric.utilities.warnings import PossibleUserWarning, disable_possible_user_warnings
from lightning.pytorch.core.saving import (
    convert,
    load_hparams_from_tags_csv,
    load_hparams_from_yaml,
    save_hparams_to_tags_csv,
    save_hparams_to_yaml,
    update_hparams,
)
from lightning.pytorch.loggers.logger import merge_dicts
from lightning.pytorch.utilities import (
    CombinedLoader,
    GradClipAlgorithmType,
    memory,
    parsing,
)
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint
from lightning.pytorch.utilities.seed import isolate_rng
from models import trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str = "a"


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return 3


class Movable:
    def to(self, device: Any, **options: Any) -> str:
        return f"moved to {device} with {sorted(options)}"


def loader(rows: int = 6, size: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(rows).float()), batch_size=size)


# -- data ----------------------------------------------------------------------------------------------------------------

ask_each(
    moves_nested=lambda: move_data_to_device(
        {"a": [torch.ones(2), "text", 3], "b": Pair(torch.zeros(1), None)}, torch.device("cpu")
    ),
    moves_dataclass=lambda: move_data_to_device(Sample(torch.ones(1)), "cpu"),
    moves_object=lambda: move_data_to_device(Movable(), "cpu"),
    moves_to_nowhere=lambda: move_data_to_device(torch.ones(1), "nowhere"),
    moves_ordered=lambda: move_data_to_device(OrderedDict(a=torch.ones(1)), "cpu"),
    converts_to_tensors=lambda: convert_to_tensors({"a": 1, "b": [2.0, True], "c": np.ones(2)}, torch.device("cpu")),
    converts_to_scalars=lambda: convert_tensors_to_scalars({"a": torch.tensor(1), "b": [torch.tensor(2.5)], "c": "x"}),
    converts_vector_to_scalar=lambda: convert_tensors_to_scalars({"a": torch.ones(2)}),
    sized=lambda: [sized_len(loader()), sized_len(DataLoader(Numbers())), sized_len(3), sized_len([1, 2])],
    has_length=lambda: [has_len(loader()), has_len([1]), has_len(DataLoader(Numbers()))],
    has_length_zero=lambda: has_len([]),
    has_length_of_sized_iterable=lambda: has_len(DataLoader(SizedNumbers())),
    iterable=lambda: [has_iterable_dataset(loader()), has_iterable_dataset(DataLoader(Numbers())), has_iterable_dataset([1])],
    workers=lambda: [suggested_max_num_workers(1) == len(os.sched_getaffinity(0)) - 1, suggested_max_num_workers(10**6)],
    workers_of_none=lambda: suggested_max_num_workers(0),
    size_of_batch=lambda: [extract_batch_size(batch) for batch in (torch.ones(3, 2), [torch.ones(4)], {"a": torch.ones(5, 1)})],
    size_of_text=lambda: extract_batch_size("text"),
    size_of_texts=lambda: extract_batch_size(["a", "bc"]),
    size_of_scalar=lambda: extract_batch_size(torch.tensor(1.0)),
    size_of_different=lambda: extract_batch_size([torch.ones(2), torch.ones(3)]),
    size_of_nothing=lambda: extract_batch_size([1, 2.0]),
    size_of_none=lambda: extract_batch_size(None),
    size_of_dataclass=lambda: extract_batch_size(Sample(torch.ones(7))),
    size_of_generator=lambda: extract_batch_size(torch.ones(2) for _ in range(1)),
)


@ask
def attributes_of_dict() -> Any:
    values = AttributeDict(lr=0.1, name="net")
    values.depth = 3
    return [
        values.lr,
        dict(values),
        repr(values),
        str(AttributeDict()),
        attempt(lambda: values.missing),
        attempt(lambda: values["no"]),
    ]


@ask
def attributes_are_deleted() -> Any:
    values = AttributeDict(a=1)
    del values["a"]
    return [attempt(lambda: delattr(values, "a")), dict(values)]


@ask
def combined() -> Any:
    found = {}
    for mode in ("min_size", "max_size", "max_size_cycle", "sequential"):
        both = CombinedLoader({"a": loader(4), "b": loader(6)}, mode)
        found[mode] = [attempt(lambda both=both: len(both)), list(iter(both)), attempt(lambda both=both: len(both)), both.limits]
    return found


ask_each(
    combined_mode=lambda: CombinedLoader([[1]], "sideways"),
    combined_length_before=lambda: len(CombinedLoader([[1, 2]], "min_size")),
    combined_next_before=lambda: next(CombinedLoader([[1, 2]], "min_size")),
    combined_limits=lambda: setattr(CombinedLoader([[1], [2]], "sequential"), "limits", [1, 2, 3]),
    combined_flattened=lambda: CombinedLoader({"a": [1], "b": [[2], [3]]}, "min_size").flattened,
    combined_reflattened=lambda: setattr(CombinedLoader([[1], [2]], "min_size"), "flattened", [[1]]),
    combined_sampler=lambda: [type(CombinedLoader([loader()]).sampler), CombinedLoader([loader(), loader()]).batch_sampler],
    combined_repr=lambda: [CombinedLoader([[1]]).iterables, CombinedLoader(loader()).dataset],
    combined_attributes=lambda: attempt(lambda: CombinedLoader([[1]]).no_such_thing),
)


# -- hyperparameters and parsing -----------------------------------------------------------------------------------------


class Base:
    def __init__(self, width: int, *rest: Any, depth: int = 2, **more: Any) -> None:
        frame = inspect.currentframe()
        self.of_frame = parsing.get_init_args(frame)
        self.collected = parsing.collect_init_args(frame, [])


class Derived(Base):
    def __init__(self, width: int, height: int = 3, **more: Any) -> None:
        super().__init__(width, depth=height, **more)


class Hyper(pl.LightningModule):
    def __init__(self, lr: float = 0.1, width: int = 2, names: Any = (), **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters(*names, **kwargs)


class Loose(pl.LightningModule):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.save_hyperparameters(given)


class Ignoring(pl.LightningModule):
    def __init__(self, lr: float, net: Any = None, loss: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])


class Config:
    def __init__(self) -> None:
        self.a = 1


ask_each(
    init_keys=lambda: parsing.parse_class_init_keys(Base),
    init_keys_alone=lambda: parsing.parse_class_init_keys(Config),
    init_args=lambda: [Derived(1, 2, extra=3).of_frame, Derived(1, 2, extra=3).collected],
    cleaned=lambda: [(clean := {"a": 1, "f": lambda: 0}), parsing.clean_namespace(clean)][0],
    cleaned_namespace=lambda: [vars(space := argparse.Namespace(a=1, f=lambda: 0)), parsing.clean_namespace(space)][0],
    picklable=lambda: [parsing.is_picklable(value) for value in (1, lambda: 0, nn.Linear(1, 1), {"a": print})],
    hparams=lambda: [Hyper(lr=0.5).hparams, Hyper(lr=0.5).hparams_initial, repr(Hyper(lr=0.5).hparams)],
    hparams_named=lambda: Hyper(lr=0.5, names=("lr",)).hparams,
    hparams_unknown_name=lambda: Hyper(names=("nothing",)).hparams,
    hparams_of_dict=lambda: Loose({"a": 1}).hparams,
    hparams_of_namespace=lambda: Loose(argparse.Namespace(a=1)).hparams,
    hparams_of_object=lambda: Loose(Config()).hparams,
    hparams_of_number=lambda: Loose(3).hparams,
    hparams_ignored=lambda: Ignoring(0.1, nn.Linear(1, 1), "mse").hparams,
    hparams_module=lambda: Ignoring(0.1, None, nn.Linear(1, 1)).hparams,
    hparams_set=lambda: setattr(Hyper(), "hparams", 3),
    hparams_none=lambda: pl.LightningModule().hparams,
    has_attribute=lambda: [parsing.lightning_hasattr(Hyper(), name) for name in ("lr", "hparams", "nothing")],
    get_attribute=lambda: parsing.lightning_getattr(Hyper(lr=0.3), "lr"),
    get_missing=lambda: parsing.lightning_getattr(Hyper(), "nothing"),
    set_missing=lambda: parsing.lightning_setattr(Hyper(), "nothing", 1),
)


@ask
def attribute_is_set() -> Any:
    module = Hyper(lr=0.3)
    parsing.lightning_setattr(module, "lr", 0.7)
    return [module.hparams, module.hparams_initial]


@ask
def files_of_hparams() -> Any:
    save_hparams_to_yaml("h.yaml", {"lr": 0.1, "layers": [1, 2], "deep": {"a": None}})
    save_hparams_to_yaml("n.yaml", argparse.Namespace(a=1))
    save_hparams_to_tags_csv("h.csv", {"lr": 0.1, "name": "x", "flag": True})
    texts = [Path(name).read_text() for name in ("h.yaml", "n.yaml", "h.csv")]
    return [texts, load_hparams_from_yaml("h.yaml"), load_hparams_from_tags_csv("h.csv")]


ask_each(
    yaml_missing=lambda: load_hparams_from_yaml("no.yaml"),
    csv_missing=lambda: load_hparams_from_tags_csv("no.csv"),
    yaml_of_number=lambda: save_hparams_to_yaml("x.yaml", 3),
    yaml_nowhere=lambda: save_hparams_to_yaml("no/folder/x.yaml", {"a": 1}),
    csv_nowhere=lambda: save_hparams_to_tags_csv("no/folder/x.csv", {"a": 1}),
    converted=lambda: [convert(text) for text in ("1", "1.5", "True", "None", "text", "[1, 2]", "")],
    merged=lambda: merge_dicts([{"a": 1.0, "b": 2.0}, {"a": 3.0}, {"d": {"e": 1}}, {"d": {"e": 3}}], {"b": max}),
    merged_custom=lambda: merge_dicts([{"a": 5, "v": 3, "d": {"x": 0}}, {"a": 2, "d": {"x": 3}}], {"a": max, "d": {"x": sum}}),
)


@ask
def updated_hparams() -> Any:
    values = {"a": {"b": 1}, "c": 2}
    update_hparams(values, {"a": {"d": 3}, "c": 4})
    return values


# -- enumerations, errors, warnings --------------------------------------------------------------------------------------


class Colour(LightningEnum):
    RED = "red"
    DARK_RED = "dark-red"


ask_each(
    enumeration=lambda: [
        Colour.RED == "RED",
        Colour.RED == "red",
        Colour.RED == Colour.RED,
        hash(Colour.RED) == hash("red"),
        Colour("red"),
    ],
    enumeration_from_text=lambda: [
        Colour.from_str("RED"),
        Colour.from_str("dark-red", source="value"),
        Colour.try_from_str("no"),
    ],
    enumeration_unknown=lambda: Colour.from_str("blue"),
    enumeration_bad_source=lambda: Colour.from_str("red", source="elsewhere"),
    clipping=lambda: [
        GradClipAlgorithmType.supported_type("norm"),
        GradClipAlgorithmType.supported_type("x"),
        GradClipAlgorithmType.supported_types(),
    ],
    error_kinds=lambda: [
        [cls.__name__ for cls in error.__mro__] for error in (MisconfigurationException, SIGTERMException, TrainingSpikeException)
    ],
    warning_kinds=lambda: [[cls.__name__ for cls in kind.__mro__] for kind in (PossibleUserWarning, LightningDeprecationWarning)],
    exit_of_sigterm=lambda: SIGTERMException().args,
    spike_error=lambda: TrainingSpikeException(3, "x").args[1:],
    warns=lambda: rank_zero.rank_zero_warn("careful"),
    warns_of_category=lambda: rank_zero.rank_zero_warn("careful", category=PossibleUserWarning),
    deprecates=lambda: rank_zero.rank_zero_deprecation("old"),
    informs=lambda: rank_zero.rank_zero_info("hello"),
    debugs=lambda: rank_zero.rank_zero_debug("hello"),
    prefixed=lambda: [rank_zero.rank_prefixed_message("m", 3), rank_zero.rank_prefixed_message("m", None)],
    types_are_asked=lambda: [
        isinstance(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), kind) for kind in (Optimizable, Steppable)
    ],
)


@ask
def only_on_rank_zero() -> Any:
    wrapped = rank_zero.rank_zero_only(lambda: "ran", default="default")
    before = rank_zero.rank_zero_only.rank
    try:
        rank_zero.rank_zero_only.rank = 1
        return [before, wrapped(), rank_zero.rank_zero_only(lambda: "ran")()]
    finally:
        rank_zero.rank_zero_only.rank = 0


@ask
def rank_of_a_process_that_is_alone() -> Any:
    """What ``RANK`` or ``SLURM_PROCID`` said at the import stays: a Trainer of one process is not asked."""
    try:
        rank_zero.rank_zero_only.rank = 1
        made = trainer()
        return [made.global_rank, rank_zero.rank_zero_only.rank]
    finally:
        rank_zero.rank_zero_only.rank = 0


@ask
def disables_warnings() -> Any:
    import warnings

    disable_possible_user_warnings()
    warnings.warn("no one sees this", PossibleUserWarning, stacklevel=1)


# -- seeds ---------------------------------------------------------------------------------------------------------------


@ask
def seeds() -> Any:
    given = seeding.seed_everything(7, workers=True)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(1))]
    state = {key: os.environ.get(key) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    seeding.reset_seed()
    return [given, drawn, state, float(torch.rand(1))]


@ask
def seeds_of_workers() -> Any:
    torch.manual_seed(3)
    seeding.pl_worker_init_function(1, rank=2)
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


@ask
def seed_of_environment() -> Any:
    found = []
    for value in ("11", "no number", "-3", None):
        os.environ.pop("PL_GLOBAL_SEED", None) if value is None else os.environ.update(PL_GLOBAL_SEED=value)
        found.append(attempt(lambda: seeding.seed_everything(verbose=False)))
    return found


@ask
def isolates() -> Any:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with isolate_rng():
        inside = [float(torch.rand(1)), float(np.random.rand()), random.random()]
    return [inside, [float(torch.rand(1)), float(np.random.rand()), random.random()]]


ask_each(
    seed_too_large=lambda: seeding.seed_everything(2**40),
    seed_negative=lambda: seeding.seed_everything(-1),
    seed_text=lambda: seeding.seed_everything("text"),
    seed_float=lambda: seeding.seed_everything(1.5),
    seed_silent=lambda: seeding.seed_everything(5, verbose=False),
)


# -- memory, throughput, spikes, checkpoints -----------------------------------------------------------------------------

ask_each(
    detached=lambda: memory.recursive_detach(
        {"a": torch.ones(1, requires_grad=True), "b": [torch.ones(1)], "c": "x"}, to_cpu=True
    ),
    out_of_memory=lambda: [
        memory.is_oom_error(error)
        for error in (
            RuntimeError("CUDA out of memory."),
            RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            RuntimeError("other"),
            ValueError("CUDA out of memory."),
        )
    ],
    collects_garbage=lambda: memory.garbage_collection_cuda(),
)


@ask
def throughput() -> Any:
    meter = Throughput(available_flops=100, world_size=2, window_size=3, separator="-")
    found = []
    for step in range(1, 5):
        meter.update(time=step * 2.0, batches=step, samples=step * 4, lengths=step * 8, flops=10)
        found.append(meter.compute())
    return found


@ask
def throughput_errors() -> Any:
    def late() -> None:
        meter = Throughput()
        meter.update(time=2.0, batches=1, samples=1)
        meter.update(time=1.0, batches=2, samples=2)

    def fewer() -> None:
        meter = Throughput()
        meter.update(time=1.0, batches=3, samples=5)
        meter.update(time=2.0, batches=2, samples=4)

    def lengths() -> None:
        meter = Throughput()
        meter.update(time=1.0, batches=1, samples=5, lengths=2)

    options: list[dict[str, Any]] = [{"available_flops": 0}, {"world_size": 0}, {"window_size": 1}]
    return [attempt(late), attempt(fewer), attempt(lengths), *(attempt(lambda o=o: Throughput(**o)) for o in options)]


@ask
def spikes() -> Any:
    return [
        attempt(lambda: SpikeDetection(rtol=None, atol=None)),
        attempt(lambda: SpikeDetection(warmup=-1)),
        attempt(lambda: SpikeDetection(exclude_batches_path="a/b").exclude_batches_path),
        attempt(lambda: SpikeDetection().state_dict()),
    ]


@ask
def cloud_files() -> Any:
    torch.save({"a": torch.ones(1)}, "a.pt")
    found = [
        cloud_io._load("a.pt"),
        type(cloud_io.get_filesystem("a.pt")).__name__,
        cloud_io._is_dir(cloud_io.get_filesystem("."), "."),
        cloud_io._is_local_file_protocol("s3://a"),
    ]
    return [*found, attempt(lambda: cloud_io._load("no.pt"))]


@ask
def migrates() -> Any:
    return [
        attempt(
            lambda: migrate_checkpoint({"state_dict": {}, "pytorch-lightning_version": "1.9.0", "epoch": 1, "global_step": 2})
        ),
        attempt(lambda: migrate_checkpoint({"state_dict": {}, "pytorch-lightning_version": "2.6.6"})),
        attempt(lambda: migrate_checkpoint({"state_dict": {}, "pytorch-lightning_version": "9.0.0"})),
        attempt(lambda: migrate_checkpoint({"state_dict": {}})),
    ]


@ask
def sampler_of_batches() -> Any:
    import pickle

    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from torch.utils.data import BatchSampler, SequentialSampler

    wrapped = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False))
    found = [len(wrapped), wrapped.batch_size, next(iter(wrapped)), next(wrapped), list(wrapped.seen_batch_indices)]
    again = pickle.loads(pickle.dumps(wrapped))
    return [*found, list(again), again.seen_batch_indices]


@ask
def layer_sync_beside_the_argument() -> Any:
    from lightning.pytorch.plugins import LayerSync
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

    class Own(LayerSync):
        def apply(self, model: nn.Module) -> nn.Module:
            return model

        def revert(self, model: nn.Module) -> nn.Module:
            return model

    def made(plugin: LayerSync) -> str:
        pl.Trainer(sync_batchnorm=True, plugins=[plugin], accelerator="cpu", devices=1, logger=False)
        return "made"

    return [attempt(lambda: made(Own())), attempt(lambda: made(TorchSyncBatchNorm()))]
