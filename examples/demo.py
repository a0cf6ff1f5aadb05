"""``make demo``: an unchanged Lightning script on a simulated 8-device mesh, stopped midway and resumed.

1. ``examples/gpt.py`` is started on a mesh data 2 × fsdp 4 of CPU devices and stopped by Ctrl-C's signal in mid-epoch.
2. It is started again and goes on from its last checkpoint to the end.
3. The loss curve of both runs is drawn, and the validation loss is compared with the unigram entropy of the text.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.2
STOP_LIMIT_S = 900


def command(args: argparse.Namespace, *, resume: bool) -> list[str]:
    """The user's command line: nothing but ``python -m torch_compat`` in front of the script."""
    flags = ["--accelerator", "cpu", "--mesh", "2", "4", *args.script_flags, "--output", str(args.output)]
    return [sys.executable, "-m", "torch_compat", "examples/gpt.py", *flags, *["--resume"] * resume]


def start(args: argparse.Namespace, *, resume: bool) -> subprocess.Popen[bytes]:
    line = command(args, resume=resume)
    print("$ python", *line[1:], flush=True)
    report = args.output / ("report_2_resumed.json" if resume else "report_1_stopped.json")
    return subprocess.Popen(line, cwd=ROOT, env={**os.environ, "XLATRAIN_REPORT": str(report)})


def run_and_stop(args: argparse.Namespace) -> None:
    """Start the training and interrupt it a little after the first checkpoint past ``args.stop_after`` steps."""
    process = start(args, resume=False)
    try:
        deadline = time.monotonic() + STOP_LIMIT_S
        while last_saved_step(args.output) < args.stop_after:
            if process.poll() is not None:
                sys.exit(f"demo: the training ended (exit code {process.returncode}) before it could be stopped; see above")
            if time.monotonic() > deadline:
                sys.exit(f"demo: no checkpoint of step {args.stop_after} or later after {STOP_LIMIT_S} s")
            time.sleep(POLL_S)
        time.sleep(args.stop_delay)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=STOP_LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code == 0:
        sys.exit("demo: the training ended by itself before SIGINT stopped it: give it more --steps, or a smaller --stop-delay")
    step = last_saved_step(args.output)
    print(f"\ndemo: stopped it with SIGINT (exit code {code}); the last checkpoint is of step {step}\n", flush=True)


def last_saved_step(output: Path) -> int:
    """The newest step of which a checkpoint is committed, -1 without one."""
    from xlatrain.checkpoint import is_checkpoint  # here: the demo itself needs no JAX

    folder = output / "checkpoints"
    if not is_checkpoint(folder / "last.ckpt"):  # what the resumed run starts from
        return -1
    names = [path.name for path in folder.glob("step=*.ckpt") if is_checkpoint(path)]
    return max((int(match[1]) for name in names if (match := re.match(r"step=(\d+)-", name))), default=-1)


def run_to_the_end(args: argparse.Namespace) -> None:
    code = start(args, resume=True).wait()
    if code != 0:
        sys.exit(f"demo: the resumed training failed with exit code {code}; see above")


def read_curve(metrics: Path, column: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column of a CSVLogger file."""
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(column)]
    return [int(row["step"]) for row in rows], [float(row[column]) for row in rows]


def draw(summary: dict, output: Path) -> None:
    """Training and validation loss of both runs, with the unigram entropy as a line, as ``loss.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for run, name in enumerate(["stopped", "resumed"]):
        metrics = output / "logs" / f"version_{run}" / "metrics.csv"
        axes.plot(*read_curve(metrics, "train_loss"), color=f"C{run}", alpha=0.5, label=f"training, {name} run")
        axes.plot(*read_curve(metrics, "val_loss"), "o-", color=f"C{run}", label=f"validation, {name} run")
    axes.axhline(summary["unigram_entropy"], color="grey", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per byte", title="Byte-level GPT on the Python standard library, mesh data 2 × fsdp 4")
    axes.legend()
    figure.tight_layout()
    figure.savefig(output / "loss.png", dpi=120)
    plt.close(figure)


def check(summary: dict, report: dict) -> None:
    """The demo fails when the model learned nothing, or when something other than a compiled mesh step ran."""
    run = next(run for run in report["runs"] if run["stage"] == "fit")
    print(f"executor: {run['executor']}, devices: {run['mesh_size']}, mesh: {run['mesh']}")
    if run["executor"] != "compiled" or run["mesh_size"] != 8:
        sys.exit("demo: expected the compiled executor on 8 devices")
    if summary["val_loss"] > 0.9 * summary["unigram_entropy"]:
        sys.exit(f"demo: validation loss {summary['val_loss']:.3f} is not well under {summary['unigram_entropy']:.3f}")


def show_results(summary: dict, output: Path) -> None:
    val_loss, entropy = summary["val_loss"], summary["unigram_entropy"]
    print(f"validation loss {val_loss:.3f} against a unigram entropy of {entropy:.3f} nats per byte")
    for what, name in [
        ("loss curve", "loss.png"),
        ("logged values", "logs"),
        ("checkpoints", "checkpoints"),
        ("run reports", "report_*.json"),
        ("summary", "summary.json"),
    ]:
        print(f"  {what + ':':<15}{output / name}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="is emptied first")
    parser.add_argument("--stop-after", type=int, default=100, help="stop once a checkpoint of this step exists")
    parser.add_argument("--stop-delay", type=float, default=5.0, help="and this many seconds have passed")
    args, args.script_flags = parser.parse_known_args()  # flags of examples/gpt.py, such as --steps
    return args


def main() -> None:
    args = parse_args()
    began = time.monotonic()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a process in a script's background would leave it ignored to its children
    os.chdir(ROOT)
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    run_and_stop(args)
    run_to_the_end(args)
    summary = json.loads((args.output / "summary.json").read_text())
    draw(summary, args.output)
    print(f"\ndemo: done in {time.monotonic() - began:.0f} s")
    check(summary, json.loads((args.output / "report_2_resumed.json").read_text()))
    show_results(summary, args.output)


if __name__ == "__main__":
    main()
