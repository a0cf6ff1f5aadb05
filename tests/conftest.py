"""The surroundings of every test: eight XLA CPU devices, an order, and nothing left behind by a test."""

from __future__ import annotations

import os

from tests.compiling import AS_FOR_USERS, QUICKLY

# Before JAX is imported: tests are about CPU devices wherever they run. The number of devices is set in this process only,
# so that processes started by a test choose their own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiled programs are kept inside the checkout, for the processes that tests start as well.
os.environ.setdefault("XLATRAIN_CACHE_DIR", os.path.join(os.path.dirname(__file__), "..", ".cache", "jax"))
# Also small ones (JAX keeps those that took a second): four of five programs of the parity tests are ones that another case had.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("XLA_FLAGS", QUICKLY)  # read once, as the first program is compiled

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import jax
import psutil
import pytest
from jax._src import compiler

from tests.groups import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401 (hooks)
from xlatrain.host.garbage import uncollected

# What stock printed was kept without a terminal: its size and colours, which libraries read, are nobody's here.
for _name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)
# A shell has what it starts in the background ignore SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

N_DEVICES = 8
jax.config.update("jax_num_cpu_devices", N_DEVICES)

_ENV_SET_BY_LIBRARIES = {
    "CUDA_MODULE_LOADING",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "GRPC_VERBOSITY",
    "KINETO_LOG_LEVEL",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "LD_LIBRARY_PATH",
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "TF_CPP_MIN_LOG_LEVEL",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TPU_LIBRARY_PATH",
    "TPU_ML_PLATFORM",
    "TRITON_CACHE_DIR",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_USE_SPMD",
}
_THREADS_OF_LIBRARIES = (
    # Pools that a library keeps for the life of the process; ours are named `xlatrain-…` and are never excused.
    "ThreadPoolExecutor-",
    "asyncio_",
    "pytest_timeout",
    "execnet",
)
_PROCESSES_THAT_STAY = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_SERVER = "-m tests.warm"  # and not its forks, whose command line is the same
_GRACE_S = 60.0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Tests are collected without looking for garbage, on which a quarter of that time went, in each worker."""
    with uncollected():
        return (yield)


def pytest_collection_finish() -> None:
    """What imports and collection have made stays: full collections then need not walk these 900 000 objects again, for half a
    second each, and JAX makes one wherever it looks for leaked tracers."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiled_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at compiled programs: XLA compiles as it does without the flags of tests/compiling.py."""
    options_of = compiler.get_compile_options

    def options(*args: Any, backend: Any = None, **given: Any) -> Any:
        found = options_of(*args, backend=backend, **given)
        if backend is not None and backend.platform == "cpu":
            found.env_option_overrides = [*AS_FOR_USERS.items(), *found.env_option_overrides]
        else:  # libtpu knows no options of XLA:CPU
            found.executable_build_options.debug_options.xla_backend_optimization_level = 3
        return found

    monkeypatch.setattr(compiler, "get_compile_options", options)


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Fail a test that leaves an environment variable added, changed or removed; the old environment is restored."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} - _ENV_SET_BY_LIBRARIES
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not names, f"the test leaked environment variables: { {name: after.get(name, '(removed)') for name in sorted(names)} }"


@pytest.fixture(autouse=True)
def no_leaked_main() -> Iterator[None]:
    """Fail a test that leaves another ``__main__`` or other arguments: children of later tests would run it."""
    main, argv = sys.modules["__main__"], sys.argv[:]
    yield
    left = (sys.modules["__main__"] is not main) * ["__main__"] + (sys.argv != argv) * ["sys.argv"]
    sys.modules["__main__"], sys.argv[:] = main, argv
    assert not left, f"the test replaced {left}"


@pytest.fixture(autouse=True)
def no_leaked_aliases() -> Iterator[None]:
    """Fail a test that leaves Lightning's names answered by us: ``import lightning`` in a later test would be another package."""
    before = _aliases()
    yield
    left = _aliases() - before
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ not in left]
    for name in left:
        sys.modules.pop(name, None)
    assert not left, f"the test left {sorted(left)} in the import system"


def _aliases() -> set[str]:
    finders = {type(finder).__name__ for finder in sys.meta_path} & {"AliasFinder"}
    return finders | {root for root in ("lightning", "lightning_fabric", "pytorch_lightning") if root in sys.modules}


@pytest.fixture(autouse=True, scope="session")
def no_programs_of_earlier_sessions() -> Iterator[None]:
    """Tests replace parts of what programs are made by; the processes that they start take programs of earlier ones."""
    from xlatrain.xla import kept_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_files, "use", lambda folder: None)
        yield


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    """A module takes the graphs and programs of any other one, so that a test would see those of the tests before it."""
    if (kept := sys.modules.get("torch_compat.step.kept_graphs")) is not None:
        kept.OF_ALL.clear()


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a non-daemon thread running: the process could not exit."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _GRACE_S
    leaked = [thread for thread in threading.enumerate() if thread not in before and _is_leak(thread)]
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    names = [thread.name for thread in leaked if thread.is_alive()]
    assert not names, f"the test leaked non-daemon threads: {names}"


def _is_leak(thread: threading.Thread) -> bool:
    return thread.is_alive() and not thread.daemon and not thread.name.startswith(_THREADS_OF_LIBRARIES)


@pytest.fixture(autouse=True, scope="module")
def no_leaked_processes() -> Iterator[None]:
    """Fail the last test of a module that leaves child processes; they are ended. By module: looking costs milliseconds."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    yield
    leaked = [child for child in me.children(recursive=True) if child.pid not in before and not _stays(child)]
    if leaked:
        gc.collect()  # persistent workers live as long as their loader, which may be in a cycle
    _, alive = psutil.wait_procs(leaked, timeout=_GRACE_S if leaked else 0)
    described = [_describe(child) for child in alive]
    for child in alive:
        child.kill()
    assert not described, f"the tests of this module leaked child processes: {described}"


def _stays(process: psutil.Process) -> bool:
    described = _describe(process)
    if _SERVER in described:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.ppid() == os.getpid()
    return any(name in described for name in _PROCESSES_THAT_STAY)


def _describe(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"{process.pid}: zombie"
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}: gone"


@pytest.fixture(autouse=True)
def no_leaked_numerics() -> Iterator[None]:
    """Fail a test that leaves 64-bit JAX, or torch's default dtype, gradient or determinism mode, changed; they are restored."""
    before = _numerics()
    yield
    after = _numerics()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    if changed:
        _restore_numerics(before)
    assert not changed, f"the test leaked numerical settings (before, after): {changed}"


def _numerics() -> dict[str, object]:
    settings: dict[str, object] = {"jax_enable_x64": jax.config.jax_enable_x64}
    torch = sys.modules.get("torch")
    settings["default_dtype"] = "torch.float32" if torch is None else str(torch.get_default_dtype())
    settings["grad_enabled"] = True if torch is None else torch.is_grad_enabled()
    settings["deterministic"] = False if torch is None else torch.are_deterministic_algorithms_enabled()
    settings["matmul_precision"] = "highest" if torch is None else torch.get_float32_matmul_precision()
    return settings


def _restore_numerics(before: dict[str, object]) -> None:
    jax.config.update("jax_enable_x64", before["jax_enable_x64"])
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_default_dtype(getattr(torch, str(before["default_dtype"]).removeprefix("torch.")))
        torch.set_grad_enabled(bool(before["grad_enabled"]))
        torch.use_deterministic_algorithms(bool(before["deterministic"]))
        torch.set_float32_matmul_precision(str(before["matmul_precision"]))
