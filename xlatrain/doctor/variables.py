"""Environment variables that decide how a run goes, and values of them that are left over or wrong."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping

from xlatrain.cluster.watch import settings
from xlatrain.doctor.finding import Finding

# Ours, with what they do. A test compares these names with those in the sources.
OURS = {
    "XLATRAIN_CACHE_DIR": "folder of compiled programs; empty: none are kept",
    "XLATRAIN_COORDINATOR": "set by `xlatrain launch`: host:port of process 0",
    "XLATRAIN_CUDNN_ATTENTION": "0: attention on GPUs is XLA's own, never cuDNN's kernel",
    "XLATRAIN_DEAD_AFTER": "seconds without a sign of life after which a process is lost",
    "XLATRAIN_ELASTIC": "set by `xlatrain launch --elastic`: processes when none is lost; the global batch is made for so many",
    "XLATRAIN_EXECUTOR": "auto, compiled or eager: how steps run",
    "XLATRAIN_HANG_AFTER": "seconds without progress after which the process that is behind is lost; 0: never",
    "XLATRAIN_HOST_MEMORY": "bytes of host memory to count on, instead of what the machine has",
    "XLATRAIN_INDEX_CHECKS": "0: steps do not look for labels and indices out of range",
    "XLATRAIN_JOIN_WITHIN": "seconds for all processes to come",
    "XLATRAIN_LEDGER": "file that a fit appends where its time went to; read by `xlatrain goodput`",
    "XLATRAIN_LOCAL_PROCESS_ID": "set by `xlatrain launch`: index on this host",
    "XLATRAIN_NEIGHBOUR_MEMORY": "set by `xlatrain launch --memory-steps`: who keeps the state in memory, and how often",
    "XLATRAIN_NO_RECOMPILATION_AFTER": "a step that is compiled again after this many runs is an error",
    "XLATRAIN_LOGITS": "how many logits a device may have at a time; 0: any number",
    "XLATRAIN_NON_FINITE": "warn, stop or skip: what a fit does at gradients that are not finite",
    "XLATRAIN_PLAN": 'plan.json of `xlatrain preflight`: strategy="auto" takes its mesh, and a run says where it differs',
    "XLATRAIN_PROCESSES": "set by `xlatrain launch`: number of processes",
    "XLATRAIN_PROCESS_ID": "set by `xlatrain launch`: index of this process",
    "XLATRAIN_RECORDED_CAPTURES": "0: each op of a step is traced as it runs; the same graph, in several times the time",
    "XLATRAIN_REPORT": "file that says what really ran",
    "XLATRAIN_RESUME_SINCE": "set by `xlatrain launch --max-restarts`: a fit continues from the newest checkpoint written since",
    "XLATRAIN_ROLL_LAYERS": "from how many copies on repeated layers become a loop",
    "XLATRAIN_SDC_CHECK": "optimizer steps from one check that replicas hold the same bits to the next (silent data corruption)",
    "XLATRAIN_SECRET": "set by `xlatrain launch`: what the processes of one run prove to each other; the same on all of them",
    "XLATRAIN_SLOW_AFTER": "seconds that processes wait for another until it is named, with its stacks; 0: never",
    "XLATRAIN_TPU_KERNELS": "0: attention on TPUs is XLA's own, never a kernel; interpret: the kernels by XLA, on any device",
    "XLATRAIN_VERBOSE": "1: whole tracebacks, and all that libraries print while a checkpoint is saved",
    "XLATRAIN_WATCH": "0: processes do not look after each other; the same on all of them",
}
_PREFIXES = ("XLATRAIN_", "TPU_", "JAX_", "LIBTPU_", "PL_", "LT_")
_NAMES = {
    "XLA_FLAGS", "PJRT_DEVICE", "CUDA_VISIBLE_DEVICES", "ALLOW_MULTIPLE_LIBTPU_LOAD", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES",
}  # fmt: skip
_EXECUTORS = ("auto", "compiled", "eager")


def relevant_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that matter and are set, sorted by name. Names that look like secrets are left out."""
    found = {name for name in environment if name in _NAMES or name.startswith(_PREFIXES)}
    return {name: environment[name] for name in sorted(found) if not re.search("KEY|TOKEN|SECRET|PASSWORD", name)}


def check_variables(environment: Mapping[str, str] = os.environ, *, launched: bool = False) -> Iterator[Finding]:
    """Variables that are misspelt, have no valid value, contradict each other, or (unless ``launched``) belong to a launch that
    is over."""
    yield from _ours(environment)
    if not launched:
        yield from _left_over(environment)
    flags = environment.get("XLA_FLAGS", "")
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", flags)
    count = environment.get("JAX_NUM_CPU_DEVICES")
    if forced and count and count != forced[1]:
        problem = f"makes {forced[1]} CPU devices, JAX_NUM_CPU_DEVICES {count}: the latter wins"
        yield Finding("warning", "XLA_FLAGS", problem, "take --xla_force_host_platform_device_count out of XLA_FLAGS")
    if "xla_dump_to" in flags:
        yield Finding(
            "warning", "XLA_FLAGS", "has --xla_dump_to: every program is written to disk", "unset XLA_FLAGS when not debugging"
        )
    if misplaced := re.findall(r"--xla_tpu_\w+", flags):
        yield Finding(
            "fault",
            "XLA_FLAGS",
            f"has flags of libtpu, {', '.join(misplaced)}: XLA ends the process at flags it does not know",
            "move them to LIBTPU_INIT_ARGS",
        )
    library = environment.get("TPU_LIBRARY_PATH")
    if library and not os.path.exists(library):
        yield Finding("fault", "TPU_LIBRARY_PATH", f"names {library}, which does not exist", "unset TPU_LIBRARY_PATH")
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("warning", "CUDA_VISIBLE_DEVICES", "is empty: GPUs are hidden from this process", "unset it")


def _ours(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(environment):
        if name.startswith("XLATRAIN_") and name not in OURS:
            similar = difflib.get_close_matches(name, OURS, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"known: {', '.join(OURS)}"
            yield Finding("warning", name, "nothing reads a variable of this name", hint)
    executor = environment.get("XLATRAIN_EXECUTOR", "auto")
    if executor not in _EXECUTORS:
        yield Finding(
            "fault", "XLATRAIN_EXECUTOR", f"is {executor!r}; expected {', '.join(_EXECUTORS)}", "set one of these, or unset it"
        )
    for name in (settings.SWITCH, settings.DEAD_AFTER, settings.HANG_AFTER, settings.JOIN_WITHIN, settings.SLOW_AFTER):
        try:
            settings.is_on(environment) if name == settings.SWITCH else settings.seconds(
                name, environment, least=0.0 if name in (settings.HANG_AFTER, settings.SLOW_AFTER) else 0.5
            )
        except ValueError as error:
            yield Finding("fault", name, f"has no valid value: {error}", f"set one, or unset {name}")


def _left_over(environment: Mapping[str, str]) -> Iterator[Finding]:
    launched = [name for name in ("XLATRAIN_COORDINATOR", "XLATRAIN_PROCESSES", "XLATRAIN_PROCESS_ID") if name in environment]
    if launched:
        yield Finding(
            "warning",
            launched[0],
            "this shell is, or pretends to be, one process of `xlatrain launch`: a run started here waits for the others",
            f"unset {' '.join(launched)}, unless doctor itself was launched",
        )
    elif environment.get("WORLD_SIZE", "1") != "1" and {"MASTER_ADDR", "RANK"} <= set(environment):
        yield Finding(
            "warning",
            "WORLD_SIZE",
            f"is {environment['WORLD_SIZE']}, as torchrun sets it: a run started here waits for the other processes",
            "unset WORLD_SIZE RANK MASTER_ADDR MASTER_PORT, unless doctor itself was started by torchrun",
        )
