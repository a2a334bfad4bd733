"""Options, and what every test runs under."""

import gc
import os
import tempfile
import types
from pathlib import Path

import jaxlib.version

# Several test processes share a GPU: none keeps memory that it does not use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
# A folder of compiled programs that other processes write to is none for tests: see below.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# The tests compile far more than they compute, and on a GPU would try several kernels each time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1 --xla_gpu_autotune_level=0"
)
# Where in the source an operation comes from is not needed, and takes time in each lowering.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
if jaxlib.version.__version__.startswith("0.10."):
    # XLA's older way to make code of a fusion takes half the time; newer versions have it no more.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import jax
import kept_programs
import kernel_table
import pytest
import tiers

import jaxllm.core.ffi
from jaxllm import training

# JAX keeps what it traced and pytest its tests: millions of objects. The garbage collector took a
# tenth of the CPU time to scan them again and again; frozen objects are scanned once.
gc.set_threshold(200_000)
_SURVIVORS = {"are_known": False}  # since a collection of all generations


def _note_survivors(phase, info):
    if phase == "stop" and info["generation"] == 2:
        _SURVIVORS["are_known"] = True


gc.callbacks.append(_note_survivors)


def pytest_runtest_logfinish():
    # Between tests: hypothesis looks for the referrers of an object, and frozen ones are not found.
    if _SURVIVORS["are_known"]:
        gc.freeze()
        _SURVIVORS["are_known"] = False


# What the test processes tell the one that prints the summary.
OUTPUT = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--covering", action="store_true", help="run fewer tests that cover all; see tests/tiers.py"
    )
    parser.addoption(
        "--require-gpu", action="store_true", help="fail, rather than skip, without a GPU"
    )
    parser.addoption(
        "--require-crosscheck", action="store_true", help="fail without torch and transformers"
    )
    parser.addoption(
        "--compiled",
        metavar="FOLDER",
        type=Path,
        help="take compiled programs from this folder, and add those of this run to it",
    )


def has_gpu() -> bool:
    """Whether the CUDA kernels can run here."""
    return jax.default_backend() == "gpu" and jaxllm.core.ffi.is_available()


class Declined(pytest.skip.Exception):
    """A kernel declines this GPU or this build: the one skip that --require-gpu allows."""

    __module__ = "builtins"  # as of pytest's own: it is left out where the reason is printed


def _skip_if_declined(why):
    """Skips the test where a kernel declines this GPU or this build, as ``why()`` says.

    Any other reason is a failure: ``why()`` must be None on an H100 with code for sm_90a.
    """
    reason = why()
    if reason is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxllm.core.ffi, "device", lambda: jaxllm.core.ffi.H100)
        everywhere = why()
    assert everywhere is None, f"declined on every GPU: {everywhere}"
    raise Declined(reason)


@pytest.fixture
def skip_if_declined():
    """A function that skips where a kernel declines this GPU or this build.

    It takes a function that returns the kernel's reason or None, such as
    ``lambda: cuda.fused_unsupported(x, columns)``.
    """
    return _skip_if_declined


def pytest_itemcollected(item):
    if item.get_closest_marker("hopper"):
        item.add_marker("gpu")


def pytest_runtest_setup(item):
    if item.get_closest_marker("hopper"):
        _skip_if_declined(jaxllm.core.ffi.no_hopper_reason)


def pytest_configure(config):
    # A GPU would compute float32 products in TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    shared = config.getoption("--compiled")
    # On a GPU only where it is asked for: nobody has seen yet that all tests stand it.
    if shared is not None or jax.default_backend() == "cpu":
        # Many programs are compiled by several tests: those that need one later find it. Each
        # process has its folder: JAX writes without a lock, and another could read half a file.
        compiled = tempfile.TemporaryDirectory(prefix="jaxllm-tests-")
        config.add_cleanup(compiled.cleanup)
        training.keep_compiled(compiled.name)
        if shared is not None:
            # Else the name of the process's folder would be part of what a program is found by.
            jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
            kept_programs.link(shared, Path(compiled.name))
            config.add_cleanup(lambda: kept_programs.add(Path(compiled.name), shared))
        else:
            kept_programs.keep_in_memory(compiled.name)
    # With several devices XLA's compiler segfaults on a program whose context is shared.
    is_one_cpu = jax.default_backend() == "cpu" and jax.device_count() == 1
    if is_one_cpu and jax.__version__.startswith("0.10."):
        kept_programs.share_contexts()
    if config.getoption("--require-gpu") and not has_gpu():
        reason = jaxllm.core.ffi.unavailable_reason() or f"JAX runs on {jax.default_backend()}"
        raise pytest.UsageError(f"--require-gpu: the CUDA kernels cannot run here: {reason}")


def deselect(config, items, away):
    config.hook.pytest_deselected(items=list(away))
    away = set(away)
    items[:] = [item for item in items if item not in away]


def pytest_collection_modifyitems(config, items):
    if jax.default_backend() == "gpu":
        deselect(config, items, [item for item in items if item.get_closest_marker("no_gpu")])
    if config.getoption("--covering"):
        away = tiers.left_out(items)
        if not has_gpu():
            away = {*away, *(item for item in items if item.get_closest_marker("gpu"))}
        deselect(config, items, away)
        # pytest-xdist passes this to the process that prints the summary.
        getattr(config, "workeroutput", config.stash.setdefault(OUTPUT, {}))["left_out"] = len(away)
    if has_gpu():
        return
    reason = jaxllm.core.ffi.unavailable_reason() or "no GPU"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU and the CUDA kernels: {reason}"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash.setdefault(OUTPUT, {}).update(getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter, config):
    number = config.stash.get(OUTPUT, {}).get("left_out")
    if number is not None:
        terminalreporter.write_line(
            f"--covering left out {number} tests; `make test-all` runs them, and so does pytest"
            " without --covering. See tests/tiers.py."
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    # With --require-gpu everything can run but what a kernel declines, so a skip hides something.
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and not (call.excinfo and isinstance(call.excinfo.value, Declined))
        and item.config.getoption("--require-gpu")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped under --require-gpu: {report.longrepr}"


@pytest.fixture
def with_hopper_gpus(monkeypatch):
    """Traces as a process does whose GPUs are Hopper's; it may lack the CUDA extension."""
    monkeypatch.setattr(jaxllm.core.ffi, "compute_capabilities", lambda: ("9.0",))


@pytest.fixture
def on_hopper(with_hopper_gpus, monkeypatch):
    """As on a machine whose GPUs are Hopper's: the program is made, and not run."""
    if not jaxllm.core.ffi.is_available():
        pytest.skip(str(jaxllm.core.ffi.unavailable_reason()))
    monkeypatch.setattr(jaxllm.core.ffi, "device", lambda: jaxllm.core.ffi.H100)


@pytest.fixture
def huggingface(request):
    """The modules torch and transformers, for comparing models with Hugging Face's."""
    if request.config.getoption("--require-crosscheck"):
        import torch
        import transformers
    else:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
    return torch, transformers


@pytest.fixture
def with_kernels(monkeypatch):
    """Traces as a process with the CUDA extension does."""
    if not jaxllm.core.ffi.is_available():
        monkeypatch.setattr(jaxllm.core.ffi, "unavailable_reason", lambda *_: None)
        stems = [f"jaxllm_{stem}" for stem in kernel_table.handlers()]
        monkeypatch.setattr(
            jaxllm.core.ffi, "_cuda", types.SimpleNamespace(registrations=lambda: stems)
        )


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    """Runs in an empty folder, where scripts write their output."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_processes(monkeypatch):
    """Keeps the processes that a test starts small: in memory, in threads and in compile time."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
