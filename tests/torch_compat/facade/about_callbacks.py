"""Callbacks, plugins and cluster environments, each used alone."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from answering import ask, ask_each, attempt
from lightning.fabric.plugins import collectives
from lightning.pytorch import callbacks as cb
from lightning.pytorch.callbacks.finetuning import multiplicative
from lightning.pytorch.plugins import environments, io, precision
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn


class Mine(cb.Callback):
    def __init__(self, state_key: str = "mine") -> None:
        self._key = state_key

    @property
    def state_key(self) -> str:
        return self._generate_state_key(key=self._key)


ALL = {
    "checkpoint": lambda: cb.ModelCheckpoint(monitor="loss"),
    "stopping": lambda: cb.EarlyStopping("loss", mode="max", patience=1),
    "timer": lambda: cb.Timer("00:00:01:00"),
    "monitor": lambda: cb.LearningRateMonitor(),
    "summary": lambda: cb.ModelSummary(),
    "swa": lambda: cb.StochasticWeightAveraging(0.1),
    "accumulation": lambda: cb.GradientAccumulationScheduler({1: 2}),
    "lambda": lambda: cb.LambdaCallback(),
    "mine": Mine,
    "plain": cb.Callback,
    "finetuning": cb.BackboneFinetuning,
    "averaging": lambda: cb.EMAWeightAveraging(),
    "stats": cb.DeviceStatsMonitor,
    "exceptions": lambda: cb.OnExceptionCheckpoint("."),
}


@ask
def states_of_callbacks() -> Any:
    return {name: [attempt(make().state_dict), attempt(lambda make=make: make().state_key)] for name, make in ALL.items()}


ask_each(
    stopping_mode=lambda: cb.EarlyStopping("loss", mode="sideways"),
    stopping_members=lambda: [
        getattr(cb.EarlyStopping("loss", min_delta=0.1, mode=mode), name)
        for mode in ("min", "max")
        for name in ("min_delta", "best_score", "wait_count", "stopped_epoch", "patience", "monitor", "mode")
    ],
    checkpoint_no_monitor=lambda: cb.ModelCheckpoint(save_top_k=2),
    checkpoint_top_k=lambda: cb.ModelCheckpoint(monitor="a", save_top_k=-2),
    checkpoint_mode=lambda: cb.ModelCheckpoint(monitor="a", mode="sideways"),
    checkpoint_intervals=lambda: cb.ModelCheckpoint(every_n_train_steps=2, every_n_epochs=3),
    checkpoint_negative=lambda: cb.ModelCheckpoint(every_n_epochs=-1),
    checkpoint_negative_steps=lambda: cb.ModelCheckpoint(every_n_train_steps=-1),
    checkpoint_time_and_steps=lambda: cb.ModelCheckpoint(every_n_train_steps=2, train_time_interval=timedelta(1)),
    checkpoint_filename=lambda: cb.ModelCheckpoint(filename="a/b", dirpath="."),
    checkpoint_names=lambda: [
        cb.ModelCheckpoint(dirpath=None, filename=name, auto_insert_metric_name=auto).format_checkpoint_name(
            {"epoch": torch.tensor(3), "step": torch.tensor(7), "loss": torch.tensor(0.12345), "val/acc": torch.tensor(0.5)},
            ver=ver,
        )
        for name in (None, "{epoch}", "{epoch:03d}-{loss:.2f}", "{val/acc:.1f}", "x-{missing:.2f}", "{step}_{loss}")
        for auto in (True, False)
        for ver in (None, 2)
    ],
    timer_text=lambda: cb.Timer("1 day"),
    timer_interval=lambda: cb.Timer(timedelta(1), interval="week"),
    timer_nothing=lambda: [
        cb.Timer().time_remaining(),
        cb.Timer().time_elapsed("train"),
        cb.Timer().start_time(),
        cb.Timer().end_time("test"),
    ],
    timer_kinds=lambda: [cb.Timer(value).time_remaining() for value in ("00:01:00:01", {"minutes": 2}, timedelta(hours=1))],
    timer_dict=lambda: cb.Timer({"fortnights": 2}),
    timer_stage=lambda: cb.Timer().time_elapsed("nowhere"),
    timer_loads=lambda: (
        timer := cb.Timer(timedelta(10)),
        timer.load_state_dict({"time_elapsed": {"train": 5.0}}),
        timer.time_elapsed(),
    )[2],
    accumulation_empty=lambda: cb.GradientAccumulationScheduler({}),
    accumulation_zero=lambda: cb.GradientAccumulationScheduler({0: 0}),
    accumulation_negative=lambda: cb.GradientAccumulationScheduler({-1: 2}),
    accumulation_text=lambda: cb.GradientAccumulationScheduler({"a": 2}),
    accumulation_text_factor=lambda: cb.GradientAccumulationScheduler({1: "2"}),
    accumulation_float=lambda: cb.GradientAccumulationScheduler({1.5: 2}),
    accumulation_goes=lambda: [
        (one := cb.GradientAccumulationScheduler({4: 2, 2: 3})).going_to_accumulate_grad_batches(),
        [one.get_accumulate_grad_batches(epoch) for epoch in range(6)],
        one.scheduling,
        one.epochs,
    ],
    accumulation_one=lambda: cb.GradientAccumulationScheduler({3: 1}).going_to_accumulate_grad_batches(),
    lambdas=lambda: cb.LambdaCallback(on_train_start=lambda t, m: None).on_train_start(None, None),
    lambdas_unknown=lambda: cb.LambdaCallback(on_nothing=lambda: None),
    swa_epoch=lambda: cb.StochasticWeightAveraging(0.1, swa_epoch_start=0),
    swa_fraction=lambda: cb.StochasticWeightAveraging(0.1, swa_epoch_start=1.5),
    swa_text=lambda: cb.StochasticWeightAveraging(0.1, swa_epoch_start="late"),
    swa_rate=lambda: cb.StochasticWeightAveraging("fast"),
    swa_rate_negative=lambda: cb.StochasticWeightAveraging(-0.1),
    swa_rate_list=lambda: cb.StochasticWeightAveraging([0.1, 0]),
    swa_function=lambda: cb.StochasticWeightAveraging(0.1, avg_fn="mean"),
    swa_device=lambda: cb.StochasticWeightAveraging(0.1, device=3),
    swa_averages=lambda: cb.StochasticWeightAveraging.avg_fn(torch.ones(1), torch.zeros(1), torch.tensor(1)),
    averaging_function=lambda: cb.WeightAveraging(avg_fn=get_ema_avg_fn(0.9)).should_update(step_idx=1),
    ema_updates=lambda: [
        cb.EMAWeightAveraging(update_every_n_steps=2, update_starting_at_step=4).should_update(step_idx=step) for step in range(8)
    ],
    ema_epochs=lambda: cb.EMAWeightAveraging(update_starting_at_epoch=2).should_update(epoch_idx=1),
    writer_interval=lambda: cb.BasePredictionWriter("never"),
    writer_batch=lambda: cb.BasePredictionWriter("batch").interval,
    writer_all=lambda: cb.BasePredictionWriter("batch_and_epoch").interval,
    writer_abstract=lambda: cb.BasePredictionWriter("batch").write_on_batch_end(None, None, None, None, None, 0, 0),
    monitor_interval=lambda: cb.LearningRateMonitor("week"),
    stats_of_no_logger=lambda: cb.DeviceStatsMonitor().setup(SimpleNamespace(logger=None, loggers=[]), None, "fit"),
    rich_refresh=lambda: [cb.RichProgressBar(refresh_rate=0).is_disabled, cb.TQDMProgressBar(refresh_rate=0).is_disabled],
    tqdm_refresh=lambda: [
        cb.TQDMProgressBar(refresh_rate=-1).refresh_rate,
        cb.TQDMProgressBar(process_position=1).process_position,
    ],
    finetuning_rates=lambda: [multiplicative(3), cb.BackboneFinetuning(2, backbone_initial_lr=0.1).unfreeze_backbone_at_epoch],
    batch_size_mode=lambda: cb.BatchSizeFinder("sideways"),
    lr_finder_mode=lambda: cb.LearningRateFinder(mode="sideways"),
    throughput_window=lambda: cb.ThroughputMonitor(lambda batch: 1, window_size=1),
    throughput_function=lambda: cb.ThroughputMonitor(None),
    callback_repr=lambda: [cb.ModelSummary(3)._max_depth, cb.ModelSummary("x")],
)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 1)
        self.alone = nn.Parameter(torch.ones(1))


@ask
def finetuning_helpers() -> Any:
    layers, kind = Layers(), cb.BaseFinetuning
    flat = [type(module).__name__ for module in kind.flatten_modules(layers)]
    kind.freeze(layers, train_bn=False)
    frozen = [parameter.requires_grad for parameter in layers.parameters()]
    kind.make_trainable(layers.body)
    optimizer = torch.optim.SGD(list(kind.filter_params(layers.body, requires_grad=True)), 0.1)
    kind.unfreeze_and_add_param_group(layers.head, optimizer)
    groups = [[group["lr"], len(group["params"])] for group in optimizer.param_groups]
    again = attempt(lambda: kind.unfreeze_and_add_param_group(layers.head, optimizer))
    return [
        flat,
        frozen,
        [parameter.requires_grad for parameter in layers.parameters()],
        groups,
        again,
        len(optimizer.param_groups),
    ]


@ask
def stopping_decisions() -> Any:
    found = []
    for options in (
        {"mode": "min", "patience": 1},
        {"mode": "max", "min_delta": 0.5},
        {"stopping_threshold": 0.2},
        {"divergence_threshold": 5.0},
        {"check_finite": True},
    ):
        callback = cb.EarlyStopping("loss", **options)
        for value in (1.0, 0.9, 1.1, 1.2, 0.1, 6.0, float("nan")):
            stops, text = callback._evaluate_stopping_criteria(torch.tensor(value))
            found.append([stops, bool(text), callback.wait_count, callback.best_score])
    return found


@ask
def stopping_state() -> Any:
    callback = cb.EarlyStopping("loss")
    callback.load_state_dict({"wait_count": 2, "stopped_epoch": 3, "best_score": torch.tensor(0.5), "patience": 9})
    return callback.state_dict()


# -- plugins -------------------------------------------------------------------------------------------------------------


@ask
def checkpoint_files() -> Any:
    plugin = TorchCheckpointIO()
    plugin.save_checkpoint({"a": torch.ones(1)}, "deep/a.ckpt")
    loaded = plugin.load_checkpoint("deep/a.ckpt")
    missing = attempt(lambda: plugin.load_checkpoint("no.ckpt"))
    options = attempt(lambda: plugin.save_checkpoint({}, "b.ckpt", storage_options={"a": 1}))
    plugin.remove_checkpoint("deep/a.ckpt")
    plugin.remove_checkpoint("deep/a.ckpt")
    return [loaded, missing, options, os.path.exists("deep/a.ckpt"), attempt(lambda: io.CheckpointIO())]


@ask
def asynchronous_files() -> Any:
    plugin = io.AsyncCheckpointIO(TorchCheckpointIO())
    plugin.save_checkpoint({"a": torch.ones(1)}, "a.ckpt")
    plugin.teardown()
    return [os.path.exists("a.ckpt"), isinstance(plugin, CheckpointIO), type(plugin.checkpoint_io).__name__]


ask_each(
    precisions=lambda: [
        [kind.__name__, kind().precision if kind is not precision.HalfPrecision else kind("bf16-true").precision]
        for kind in (precision.Precision, precision.DoublePrecision, precision.HalfPrecision)
    ],
    half_wrong=lambda: precision.HalfPrecision("8-true"),
    half_of=lambda: precision.HalfPrecision("16-true").convert_input({"x": torch.ones(1), "i": torch.tensor(1)}),
    double_of=lambda: [
        precision.DoublePrecision().convert_input(torch.ones(1)),
        precision.DoublePrecision().convert_module(nn.Linear(1, 1)).weight.dtype == torch.double,
    ],
    mixed=lambda: [
        precision.MixedPrecision("bf16-mixed", "cpu").precision,
        precision.MixedPrecision("bf16-mixed", "cpu").state_dict(),
    ],
    mixed_wrong=lambda: precision.MixedPrecision("8-mixed", "cpu"),
    mixed_scaler=lambda: precision.MixedPrecision("bf16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu")),
    clips=lambda: precision.Precision().clip_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), 1.0),
    clips_wrong=lambda: precision.Precision().clip_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), 1.0, "other"),
    parameters=lambda: len(list(precision.Precision().main_params(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)))),
    single_collective=lambda: [
        (one := collectives.SingleDeviceCollective()).rank,
        one.world_size,
        one.broadcast(torch.ones(1), 0),
        one.all_reduce(torch.ones(1)),
        one.reduce(torch.ones(1), 0),
        one.barrier(),
        one.all_gather([], torch.ones(1)),
    ],
    single_collective_group=lambda: [
        (one := collectives.SingleDeviceCollective()).setup() is one,
        one.create_group() is one,
        one.teardown() is one,
        one.is_available(),
    ],
    tuner_of=lambda: Tuner(None),
)


@ask
def environments_alone() -> Any:
    found: dict[str, Any] = {}
    settings = {
        "LightningEnvironment": {
            "LOCAL_RANK": "1",
            "NODE_RANK": "2",
            "MASTER_ADDR": "1.2.3.4",
            "MASTER_PORT": "77",
            "WORLD_SIZE": "8",
        },
        "TorchElasticEnvironment": {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "GROUP_RANK": "1",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "9",
            "TORCHELASTIC_RUN_ID": "x",
        },
        "SLURMEnvironment": {
            "SLURM_NTASKS": "4",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_PROCID": "3",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1",
            "SLURM_JOB_ID": "15001",
            "SLURM_NODELIST": "host[3-5,8]",
            "SLURM_JOB_NAME": "train",
        },
        "KubeflowEnvironment": {
            "KUBERNETES_PORT": "x",
            "MASTER_ADDR": "k",
            "MASTER_PORT": "5",
            "WORLD_SIZE": "6",
            "RANK": "2",
        },
        "LSFEnvironment": {
            "LSB_JOBID": "123456",
            "JSM_NAMESPACE_SIZE": "4",
            "JSM_NAMESPACE_RANK": "3",
            "JSM_NAMESPACE_LOCAL_RANK": "1",
            "LSB_DJOB_RANKFILE": "ranks",
        },
    }
    Path("ranks").write_text("launch\nhost1\nhost1\nhost2\nhost2\n")
    names = {name for values in settings.values() for name in values}
    for kind, values in settings.items():
        before = {name: os.environ.pop(name) for name in names if name in os.environ}
        os.environ.update(values)
        cls = getattr(environments, kind)
        try:
            one = cls()
            found[kind] = [
                attempt(getattr(one, name)) for name in ("world_size", "global_rank", "local_rank", "node_rank", "detect")
            ]
            found[kind] += [
                attempt(lambda one=one, name=name: getattr(one, name))
                for name in ("main_address", "main_port", "creates_processes_externally")
            ]
            found[kind] += [
                attempt(lambda one=one: one.validate_settings(3, 2)),
                attempt(lambda one=one: one.set_world_size(5)),
                attempt(lambda one=one: one.set_global_rank(1)),
            ]
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"
        rank_zero_only.rank = 0
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
    return found


@ask
def environments_missing() -> Any:
    return {
        name: [attempt(getattr(environments, name)), attempt(lambda name=name: getattr(environments, name).detect())]
        for name in (
            "SLURMEnvironment",
            "KubeflowEnvironment",
            "LSFEnvironment",
            "TorchElasticEnvironment",
            "LightningEnvironment",
        )
    }


ask_each(
    slurm_root=lambda: [
        environments.SLURMEnvironment.resolve_root_node_address(nodes)
        for nodes in ("alpha,beta", "alpha[2-5,7]", "alpha beta", "host[1,3]", "n[01-03]", "host-[5]", "127.0.0.1")
    ],
    slurm_job=lambda: [environments.SLURMEnvironment.job_name(), environments.SLURMEnvironment.job_id()],
    slurm_options=lambda: environments.SLURMEnvironment(auto_requeue=False).auto_requeue,
    environment_abstract=lambda: environments.ClusterEnvironment(),
)
