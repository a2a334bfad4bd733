"""Device time of a call, measured in the same way for JAX and torch.

The time of a call is the device's busy time: the union of the intervals of its kernels, copies and
fills, from the framework's own profiler. Launch gaps and host time do not count. On one CUDA stream
it is the sum of the kernels' durations; kernels that overlap count once.

``wall`` is the fallback without such a trace (a CPU, or a profiler that records no kernels): host
time over a run of calls that is long enough to make the launch cost negligible.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TIMERS = ("trace", "wall")

# Inputs rotate through four times the largest L2 cache in use (60 MB on an H200), so that no call's
# inputs are cached. Tiny inputs stop at MAX_SETS sets, with a note.
ROTATION_BYTES = 4 * 60 * 10**6
MAX_SETS = 64

_WARM_UP_SECONDS = 0.1  # an idle GPU takes several milliseconds to raise its clocks
_WALL_SECONDS = 0.02  # one repetition of the wall timer
_WALL_TOTAL_SECONDS = 10  # all repetitions, unless three take longer


class NoKernelsError(RuntimeError):
    """The trace has no device events; the message lists what it has."""


class Event(NamedTuple):
    """One kernel, copy or fill on the device."""

    start_ns: float
    duration_ns: float
    name: str


@dataclasses.dataclass(frozen=True)
class Timing:
    """The device time of a call over the repetitions, in microseconds.

    Attributes:
        times_us: One time per repetition; a single mean if the trace could not be split.
        timer: ``"trace"`` or ``"wall"``.
        note: A remark for the reader.
    """

    times_us: tuple[float, ...]
    timer: str
    note: str = ""

    def percentile(self, percent: float) -> float:
        """A percentile of the times; 50 is the median."""
        return float(np.percentile(self.times_us, percent))


def number_of_sets(bytes_per_set: int, least: int = 2) -> tuple[int, str]:
    """The number of input sets to rotate through, and a note if they fit in the L2 cache."""
    wanted = math.ceil(ROTATION_BYTES / max(1, bytes_per_set))
    if wanted <= MAX_SETS:
        return max(least, wanted), ""
    return max(least, MAX_SETS), "inputs fit in L2"


def busy_ns(events: Sequence[Event]) -> float:
    """The length of the union of the events' intervals; ``events`` are sorted by start."""
    total, end = 0.0, -math.inf
    for event in events:
        stop = event.start_ns + event.duration_ns
        total += max(0.0, stop - max(event.start_ns, end))
        end = max(end, stop)
    return total


def exposed_ns(events: Sequence[Event]) -> float:
    """How long one GPU only communicates: NCCL's kernels run, and no other; sorted by start.

    It includes the time for which NCCL waits for other GPUs.
    """
    return busy_ns(events) - busy_ns([event for event in events if "nccl" not in event.name])


def split(events: Sequence[Event], repetitions: int) -> tuple[tuple[float, ...], str]:
    """The busy time of each repetition of one call, in microseconds, and a note.

    Every repetition launches the same kernels, so the events, sorted by start, split into equal
    chunks. If they do not, the result is the mean over the repetitions.
    """
    events = sorted(events)
    count, rest = divmod(len(events), repetitions)
    chunks = [events[i * count : (i + 1) * count] for i in range(repetitions)]
    kernels = [collections.Counter(event.name for event in chunk) for chunk in chunks]
    if rest == 0 and all(names == kernels[0] for names in kernels):
        return tuple(busy_ns(chunk) / 1e3 for chunk in chunks), f"kernels={count}"
    mean = busy_ns(events) / repetitions / 1e3
    return (mean,), f"mean only: {len(events)} kernels do not split into {repetitions} repetitions"


# JAX


def record_jax(run: Callable[[], Any], gpu: str = "") -> list[Event]:
    """The device events of ``run``, which must block until its work is done.

    Args:
        run: The function.
        gpu: The number of one GPU; "" for all.

    Raises:
        NoKernelsError: The trace has none.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the host side only makes the trace large
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        files = sorted(Path(directory).rglob("*.xplane.pb"))
        planes = [
            plane
            for file in files
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        ]
        events = read_planes(planes, gpu)
        if not events:
            raise NoKernelsError(f"no device events in JAX's trace; it has {_describe(planes)}")
    return events


def read_planes(planes: Sequence[Any], gpu: str = "") -> list[Event]:
    """The device events of a trace's planes, of one GPU or all.

    A GPU's plane has one line per CUDA stream. Its other lines ("XLA Modules", "XLA Ops",
    "Framework Ops", ...) are derived from these and would count the same time again.
    """
    wanted = re.compile(rf"/device:GPU:{gpu or '[0-9]+'}\b")
    return sorted(
        Event(float(event.start_ns), float(event.duration_ns), event.name)
        for plane in planes
        if wanted.match(plane.name)
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def _describe(planes: Sequence[Any]) -> str:
    lines = [f"{plane.name}: {[line.name for line in plane.lines]}" for plane in planes]
    return "; ".join(lines) or "no planes"


def time_jax(
    fn: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    *,
    repetitions: int = 30,
    timer: str = "trace",
    renew: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None,
) -> Timing:
    """The device time of a jitted function.

    Args:
        fn: The function; every set of arguments launches the same kernels.
        sets: Tuples of arguments to rotate through.
        repetitions: How often to time it.
        timer: ``"trace"`` or ``"wall"``; a trace without kernels falls back to ``"wall"``.
        renew: ``renew(arguments, result)`` returns the next arguments, if ``fn`` donates some.
    """
    import jax

    sets = list(sets)

    def run(calls: int) -> None:
        result = None
        for i in range(calls):
            arguments = sets[i % len(sets)]
            result = fn(*arguments)
            if renew:
                sets[i % len(sets)] = renew(arguments, result)
        jax.block_until_ready(result)

    run(len(sets))  # compiles; a pullback may compile once per set
    if timer == "trace":
        _warm_up(run, len(sets))
        try:
            return _trace(lambda: record_jax(lambda: run(repetitions)), repetitions)
        except NoKernelsError as error:
            print(f"{error}; falling back to the wall timer", file=sys.stderr)
    if renew:  # inside another jitted function nothing can be donated
        return _wall(lambda count: run(count * len(sets)), len(sets), repetitions)
    chain = jax.jit(lambda sets: _chain(fn, sets))

    def run_chain(calls: int) -> None:
        result = None
        for _ in range(calls):
            result = chain(sets)
        jax.block_until_ready(result)

    run_chain(1)
    return _wall(run_chain, len(sets), repetitions)


def time_jax_consuming(
    fn: Callable[..., Any],
    make_set: Callable[[int], tuple[Any, ...]],
    *,
    repetitions: int,
    timer: str = "trace",
) -> Timing:
    """The device time of a function that may overwrite its arguments: each call has its own.

    Args:
        fn: As in :func:`time_jax`.
        make_set: Makes a tuple of arguments from a seed.
        repetitions: How often to time it; all arguments are created before the first.
        timer: As in :func:`time_jax`.
    """
    import jax

    def fresh(count: int) -> list[tuple[Any, ...]]:
        return jax.block_until_ready([make_set(seed) for seed in range(count)])

    def run(sets: list[tuple[Any, ...]]) -> None:
        result = None
        for arguments in sets:
            result = fn(*arguments)
        jax.block_until_ready(result)

    def record() -> list[Event]:
        sets = fresh(repetitions)
        return record_jax(lambda: run(sets))

    run(fresh(2))
    if timer == "trace":
        try:
            return _trace(record, repetitions)
        except NoKernelsError as error:
            print(f"{error}; falling back to the wall timer", file=sys.stderr)
    times = []
    for seed in range(repetitions):
        arguments = jax.block_until_ready(make_set(seed))
        start = time.perf_counter()
        run([arguments])
        times.append((time.perf_counter() - start) * 1e6)
    return Timing(tuple(times), "wall", "host time, launch cost included")


def _chain(fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Calls ``fn`` on every set, each call after the one before it."""
    import jax

    results: list[Any] = []
    for arguments in sets:
        if results:
            # Without this dependence XLA may fuse the calls into one kernel.
            arguments, results[-1] = jax.lax.optimization_barrier((arguments, results[-1]))
        results.append(fn(*arguments))
    return results


# torch


def record_torch(run: Callable[[], None]) -> list[Event]:
    """The device events of ``run``, which must synchronize after its work.

    Raises:
        NoKernelsError: The trace has none.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    events = read_chrome_trace(trace)
    if not events:
        kinds = sorted({str(event.get("cat")) for event in trace["traceEvents"]})
        raise NoKernelsError(f"no device events in torch's trace; it has {kinds}")
    return events


def read_chrome_trace(trace: dict[str, Any]) -> list[Event]:
    """The device events of a torch trace, without annotations, which span kernels."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return sorted(
        Event(float(event["ts"]) * 1e3, float(event["dur"]) * 1e3, event["name"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and str(event.get("cat")).lower() in kinds
    )


def time_torch(
    calls: Sequence[Callable[[], Any]], *, repetitions: int = 30, timer: str = "trace"
) -> Timing:
    """The device time of a torch call; ``calls`` has one closure per input set."""
    import torch

    def run(count: int) -> None:
        for i in range(count):
            calls[i % len(calls)]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    run(len(calls))
    if timer == "trace":
        _warm_up(run, len(calls))
        try:
            return _trace(lambda: record_torch(lambda: run(repetitions)), repetitions)
        except NoKernelsError as error:
            print(f"{error}; falling back to the wall timer", file=sys.stderr)
    return _wall(lambda count: run(count * len(calls)), len(calls), repetitions)


# Both


def _warm_up(run: Callable[[int], None], count: int) -> None:
    end = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < end:
        run(count)


def _trace(record: Callable[[], list[Event]], repetitions: int) -> Timing:
    times, note = split(record(), repetitions)
    if len(times) < repetitions:
        # A profiler may lose events right after its start; a second try is cheap.
        times, note = split(record(), repetitions)
    return Timing(times, "trace", note)


def _wall(run: Callable[[int], None], calls_per_run: int, repetitions: int) -> Timing:
    """Host time of a call, where ``run(n)`` makes ``n * calls_per_run`` calls and blocks once."""
    start = time.perf_counter()
    run(1)
    seconds = time.perf_counter() - start
    count = max(1, math.ceil(_WALL_SECONDS / seconds))
    repetitions = min(repetitions, max(3, math.ceil(_WALL_TOTAL_SECONDS / (count * seconds))))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run(count)
        times.append((time.perf_counter() - start) * 1e6 / (count * calls_per_run))
    return Timing(tuple(times), "wall", "host time, launch cost included")


# The machine's limits


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of this GPU in this run.

    Attributes:
        copy_gb_per_s: A large device-to-device copy; reads and writes both count.
        matmul_tflop_per_s: A large bfloat16 matmul.
        source: The framework that measured it.
    """

    copy_gb_per_s: float
    matmul_tflop_per_s: float
    source: str


def limit_sizes(smoke: bool) -> tuple[int, int]:
    """The copy's bytes and the matmul's width: 2 GiB and 8192, or tiny ones."""
    return (2**20, 128) if smoke else (2**31, 8192)


def jax_limits(timer: str, smoke: bool = False) -> Limits:
    """Measures the limits with JAX alone; XLA turns the copy into a memcpy or a kernel."""
    import jax
    import jax.numpy as jnp

    size, width = limit_sizes(smoke)
    repetitions = 3 if smoke else 20
    # Random bits are incompressible. The speed of a copy does not depend on the dtype.
    source = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    copy = time_jax(jax.jit(jnp.copy), [(source,)], repetitions=repetitions, timer=timer)
    del source
    keys = jax.random.split(jax.random.key(1), 2)
    a, b = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    matmul = time_jax(jax.jit(jnp.matmul), [(a, b), (b, a)], repetitions=repetitions, timer=timer)
    return limits_from(copy, matmul, size, width, "jax")


def limits_from(copy: Timing, matmul: Timing, size: int, width: int, source: str) -> Limits:
    """The two rates from the two times."""
    return Limits(
        copy_gb_per_s=2 * size / copy.percentile(50) / 1e3,
        matmul_tflop_per_s=2 * width**3 / matmul.percentile(50) / 1e6,
        source=f"{source} ({copy.timer})",
    )
