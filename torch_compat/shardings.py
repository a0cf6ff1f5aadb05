"""``xlatrain shardings``: the sharding table of a script's module, without values and without running a step."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer
    from xlatrain.mesh.sharding import ShardingTable


class _Command:
    HELP = "print what lies where of a script's module: bytes per device, what is replicated and why, which rule matched"

    def main(self, arguments: Sequence[str]) -> int:
        """Run ``xlatrain shardings …``; returns 0, 1 if there are warnings and ``--strict``, 2 if it cannot be said."""
        args = _parser(self.HELP).parse_args(arguments)
        script = ["-m", *args.module] if args.module else args.script
        if not script:
            print("xlatrain shardings: which script? Example: xlatrain shardings train.py", file=sys.stderr)
            return 2
        from torch_compat.utilities.exceptions import MisconfigurationException
        from xlatrain.mesh.sharding import check_ending, save_table
        from xlatrain.preflight import LibtpuError, TopologyError

        try:
            for path in args.output:
                check_ending(path)
            table = _of_script(script, args.topology, args.num_slices)
        except (MisconfigurationException, TopologyError, LibtpuError, ValueError) as error:
            print(f"xlatrain shardings: {error}", file=sys.stderr)
            return 2
        print(json.dumps(table.to_dict(), indent=1) if args.json else table)
        for path in args.output:
            print(f"xlatrain shardings: wrote {save_table(table, path)}", file=sys.stderr)
        return 1 if args.strict and table.warnings else 0


COMMAND = _Command()


def shardings(
    trainer: Trainer, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None
) -> ShardingTable:
    """The sharding table at the beginning of ``trainer.fit(model)``. Nothing is placed and nothing runs.

    Hooks up to ``configure_optimizers`` are called as in a run.

    Raises:
        MisconfigurationException: the strategy starts processes itself, or what ``fit`` would raise.
        ValueError: rules that cannot be followed.
    """
    from torch_compat.preflight.finder import attached
    from torch_compat.run.states import RunningStage
    from torch_compat.strategies.sharding_report import table_of
    from torch_compat.trainer.data.data_source import loaders_and_datamodule
    from torch_compat.trainer.run import set_up
    from torch_compat.utilities.exceptions import MisconfigurationException

    train_dataloaders, datamodule = loaders_and_datamodule(train_dataloaders, datamodule, val_dataloaders, "fit")
    strategy = trainer.strategy
    if strategy.launcher is not None:
        raise MisconfigurationException(f"{type(strategy).__name__} starts processes on one host: use strategy='ddp' for this")
    with attached(trainer, getattr(model, "_orig_mod", model), datamodule):
        trainer.state.stage = RunningStage.TRAINING
        trainer.fit_loop.source.reset(train_dataloaders)
        trainer.validate_loop.source.reset(val_dataloaders)
        set_up(trainer)
        with trainer.executor.running():
            strategy.setup(trainer)
            trainer.executor.start()
            trainer.executor.setup_optimizers()
            if strategy.placed is None:
                raise MisconfigurationException("the module runs eagerly here, so nothing of it is on a mesh")
            return table_of(strategy, strategy.placed)


def _of_script(script: Sequence[str], topology: str | None, slices: int) -> ShardingTable:
    from torch_compat.preflight.script import until_fit
    from torch_compat.trainer.devices import described_devices
    from xlatrain.preflight import Topology

    def table(
        trainer: Trainer,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **others: Any,
    ) -> ShardingTable:
        """Make the table from the arguments of ``fit``; others do not change where arrays lie."""
        return shardings(trainer, model, train_dataloaders, val_dataloaders, datamodule)

    devices = None if topology is None else Topology.parse(topology, slices).devices()
    with contextlib.nullcontext() if devices is None else described_devices(devices):
        return until_fit(script, table)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlatrain shardings",
        description=f"{description}. The script runs up to its trainer.fit; parameters take no memory.",
    )
    parser.add_argument("--topology", metavar="NAME", help="v5e:4x4, cpu:8, …, instead of the devices that the script asks for")
    parser.add_argument("--num-slices", type=int, default=1, metavar="N", help="slices of that topology (default: 1)")
    parser.add_argument("--output", action="append", default=[], metavar="PATH", help="write it there: .svg, .json or .txt")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a rule matches nothing or an axis splits nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="the module to run, as for python")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script to run, with its arguments")
    return parser
