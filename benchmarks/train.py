"""Times a training step of GPT-2 or Llama 3: ours, plain JAX and torch, in one run on one GPU.

``python -m benchmarks.train`` times each implementation in its own process, one after another,
prints a table, and appends its rows to ``benchmarks/results/<gpu>_train.csv``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import energy, timing
from benchmarks.arguments import check_counts, check_csv
from benchmarks.record import PROVENANCE, ROOT, append_rows, format_table, provenance, slug

IMPLEMENTATIONS = ("plain", "plain_unrolled", "torch_compile", "jaxllm")
# The default preset, batch size and sequence length of each model.
MODELS = {"gpt2": ("d12", 32, 1024), "llama3": ("3.2-1b", 4, 4096)}
# A shape of no preset: transformer-1p3b of jax-linear-attention, which publishes its float8 speed.
_SHAPES = {
    "llama3": {"1.3b": {"layers": 24, "width": 2048, "heads": 32, "kv_heads": 8, "mlp_width": 5632}}
}
# Those of the baselines: so low that equal models have equal losses for a few dozen steps.
LEARNING_RATES = {"gpt2": 6e-4, "llama3": 1e-4}
COLUMNS = (
    *PROVENANCE,
    *("model", "batch_size", "seq_len", "implementation", "backend", "dtype"),
    *("step_ms", "tokens_per_s", "mfu", "peak_gib", "loss", "steps", "timer", "note"),
)

_GROUPS = 3  # timed runs of --steps steps; the median is reported
_WARM_UP = 3
_BATCHES = 4  # on the device, used in rotation, so that no step waits for the host
_PROFILED = 3
_REPORT = "TRAIN-REPORT "
_EXCEPTION = r"[\w.]+(Error|Exception|Failed|Unsupported)\b"  # the last two are torch's


# Kernel categories


# The first pattern that matches a kernel's name decides. Our CUDA kernels are in the namespace
# jaxllm, also in mangled names. A Pallas kernel has the name of its function.
_OURS = "ours"
_CATEGORIES = (
    (_OURS, r"\bjaxllm::|6jaxllm"),
    ("GEMM", r"cublas|cutlass(?!.*(fmha|sdpa|flash))|gemm|nvjet|xmma|splitk"),
    ("attention", r"cudnn|fmha|sdpa|flash_(f|b)prop"),
    (_OURS, r"^\w+_(forward|backward|kernel)(_+\d+)*$"),
    ("copies and fills", r"^(memcpy|memset)|^(wrapped_|loop_)?copy(_fusion)?(_\d+)*$"),
    (
        "XLA fusions",
        r"fusion|^(wrapped|loop|input|triton|copy|transpose|broadcast|concatenate)_?",
    ),
)


def category(kernel: str) -> str:
    """The category of a kernel, by its name."""
    found = (name for name, pattern in _CATEGORIES if re.search(pattern, kernel, re.IGNORECASE))
    return next(found, "other")


def breakdown(events: Sequence[timing.Event], steps: int, top: int = 25) -> str:
    """Two tables of milliseconds per step: by category, and for the longest kernels."""
    times: dict[str, float] = collections.defaultdict(float)
    groups: dict[str, float] = collections.defaultdict(float)
    counts = collections.Counter(event.name for event in events)
    launches = collections.Counter(category(event.name) for event in events)
    for event in events:
        milliseconds = event.duration_ns / 1e6 / steps
        times[event.name] += milliseconds
        groups[category(event.name)] += milliseconds
    total = sum(groups.values())
    by_group = [
        (name, f"{t:.3f}", f"{t / total:.1%}", f"{launches[name] / steps:g}", "")
        for name, t in _longest(groups)
    ]
    by_group.append(("all", f"{total:.3f}", "", f"{len(events) / steps:g}", ""))
    by_kernel = [
        (category(name), f"{t:.3f}", f"{counts[name] / steps:g}", name[:110])
        for name, t in _longest(times)[:top]
    ]
    return "\n\n".join(
        (
            format_table(("category", "ms a step", "share", "launches", ""), by_group),
            format_table(("category", "ms a step", "launches", "kernel"), by_kernel),
        )
    )


def _longest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


# One implementation, in its own process


class _Trainer(NamedTuple):
    """An implementation with its state and its batches.

    Attributes:
        run: Runs this many steps, waits for the device, and returns the last loss.
        peak_bytes: The peak memory use so far; None where the allocator does not report it.
        origin: The provenance of its rows.
    """

    run: Callable[[int], Any]
    peak_bytes: Callable[[], int | None]
    origin: dict[str, str]


def _batches(
    options: argparse.Namespace, vocab_size: int, microbatches: int = 1
) -> list[tuple[np.ndarray, ...]]:
    rows = microbatches * options.batch_size
    if options.data:
        from jaxllm import data

        shards = data.open_split(options.data, "train")
        shape = (rows, options.seq_len)
        return [data.batch(shards, *shape, seed=0, step=step) for step in range(_BATCHES)]
    rng = np.random.default_rng(0)
    shape = (_BATCHES, rows, options.seq_len + 1)
    samples = rng.integers(0, vocab_size, shape, np.int32)
    return [(sample[:, :-1], sample[:, 1:]) for sample in samples]


def _documents(options: argparse.Namespace, rows: int) -> list[tuple[np.ndarray, ...]]:
    """The segment ids and positions of each batch; empty tuples where each row is a document.

    After each token a document ends with the probability 1/N, for N the mean length. So lengths
    have a geometric distribution, and documents cross the ends of rows, as in a stream of text.
    """
    from jaxllm import data

    (mean,) = options.documents
    if not mean:
        return [()] * _BATCHES
    is_end = np.random.default_rng(1).random((_BATCHES, rows, options.seq_len)) < 1 / mean
    return [data.find_documents(ends.astype(np.int32), end_of_text=1) for ends in is_end]


def _module(options: argparse.Namespace) -> Any:
    """Our model's module."""
    return importlib.import_module(f"jaxllm.models.{options.model}")


def _presets(options: argparse.Namespace) -> dict[str, Any]:
    """Our model's presets, and other shapes."""
    presets = dict(_module(options).PRESETS)
    for name, shape in _SHAPES.get(options.model, {}).items():
        presets[name] = dataclasses.replace(presets["3.1-8b"], **shape)
    return presets


def _plain(options: argparse.Namespace, model: Any) -> tuple[Any, Callable[..., Any]]:
    """The state and ``step(state, tokens, labels) -> (state, loss)`` of the baseline."""
    import jax

    from benchmarks import plain_gpt2, plain_llama3

    # cuDNN has no kernel for a smoke test's tiny shapes.
    cudnn = jax.default_backend() == "gpu" and not options.smoke
    common = {
        "layers": model.layers,
        "heads": model.heads,
        "width": model.width,
        "vocab_size": model.padded_vocab_size,
        "unrolled": options.worker == "plain_unrolled",
        "attention": "cudnn" if cudnn else "xla",
        "dtype": options.dtype,
    }
    if options.model == "gpt2":
        config = plain_gpt2.Config(max_seq_len=model.max_seq_len, **common)
        init_state, step = plain_gpt2.make_step(config)
    else:
        config = plain_llama3.Config(
            kv_heads=model.kv_heads,
            mlp_width=model.mlp_width,
            rope_theta=model.rope_theta,
            rope_factor=model.rope_scaling.factor if model.rope_scaling else 1.0,
            **common,
        )
        init_state, step = plain_llama3.make_step(config)
    return init_state(jax.random.key(0)), step


def _jaxllm(options: argparse.Namespace, model: Any) -> tuple[Any, Callable[..., Any]]:
    """The state and step of jaxllm, in the form of :func:`_plain`."""
    import jax

    from jaxllm import training
    from jaxllm.models.common import unstack

    module = _module(options)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array, *documents: Any) -> jax.Array:
        how = dict(zip(("segment_ids", "positions"), documents, strict=False))
        return module.loss(params, tokens, labels, model, precision=options.precision[0], **how)

    optimizer = training.adamw(LEARNING_RATES[options.model])
    params = unstack(module.init(jax.random.key(0), model))
    copy_dtype = None if options.dtype == "float32" else options.dtype
    state = training.init_state(params, optimizer, copy_dtype=copy_dtype)
    train_step = training.make_train_step(loss, optimizer, compute_dtype=options.dtype)

    def step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        state, metrics = train_step(state, *batch)
        return state, metrics["loss"]

    return state, step


def _model(options: argparse.Namespace) -> Any:
    """The preset, with positions for the sequence length; a tiny model for a smoke test."""
    preset = _presets(options)[options.preset]
    if options.smoke:
        sizes = {"vocab_size": 250, "max_seq_len": options.seq_len, "layers": 2, "heads": 2}
        more = {} if options.model == "gpt2" else {"kv_heads": 1, "mlp_width": 64}
        return dataclasses.replace(preset, width=32, **sizes, **more)
    return dataclasses.replace(preset, max_seq_len=max(preset.max_seq_len, options.seq_len))


def _jax_trainer(options: argparse.Namespace, model: Any) -> _Trainer:
    import jax
    import jax.numpy as jnp

    ours = options.worker == "jaxllm"
    state, step = (_jaxllm if ours else _plain)(options, model)
    # The library's step takes microbatches on a leading axis.
    leading = (options.accumulate,) if ours else ()
    shape = (*leading, options.batch_size, options.seq_len)
    rows = options.accumulate * options.batch_size
    documents = _documents(options, rows) if ours else [()] * _BATCHES
    batches = [
        tuple(jnp.asarray(part.reshape(shape)) for part in (*batch, *more))
        for batch, more in zip(
            _batches(options, model.vocab_size, options.accumulate), documents, strict=True
        )
    ]

    def run(steps: int) -> Any:
        nonlocal state
        value = None
        for i in range(steps):
            state, value = step(state, *batches[i % len(batches)])
        jax.block_until_ready((state, value))
        return value

    def peak_bytes() -> int | None:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    return _Trainer(run, peak_bytes, provenance())


def _torch_trainer(options: argparse.Namespace, model: Any) -> _Trainer:
    import torch

    from benchmarks import torch_gpt2

    on_gpu = torch.cuda.is_available()
    config = torch_gpt2.Config(
        layers=model.layers,
        heads=model.heads,
        width=model.width,
        max_seq_len=model.max_seq_len,
        vocab_size=model.padded_vocab_size,
        dtype=options.dtype,
        # For a smoke test's tiny shapes, and without a C++ compiler.
        fused_attention=not options.smoke,
        compiler="aot_eager" if options.smoke else "inductor",
    )
    device = "cuda" if on_gpu else "cpu"
    _, step = torch_gpt2.make_step(config, device)
    batches = [
        tuple(torch.tensor(part, dtype=torch.int64, device=device) for part in batch)
        for batch in _batches(options, model.vocab_size)
    ]

    def run(steps: int) -> Any:
        value = None
        for i in range(steps):
            value = step(*batches[i % len(batches)])
        if on_gpu:
            torch.cuda.synchronize()
        return value

    def peak_bytes() -> int | None:
        return torch.cuda.max_memory_allocated() if on_gpu else None

    # JAX must not start in this process: it would reserve most of the memory.
    gpu = torch.cuda.get_device_name() if on_gpu else "cpu"
    return _Trainer(run, peak_bytes, provenance((gpu, torch.version.cuda or "")))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Times one implementation; the fields of its row."""
    import jaxllm
    from jaxllm import training

    in_torch = options.worker == "torch_compile"
    model = _model(options)
    trainer = (_torch_trainer if in_torch else _jax_trainer)(options, model)
    # The library's step takes its backend from this context; plain JAX ignores it.
    with jaxllm.use_backend(options.backend[0]):
        start = time.perf_counter()
        trainer.run(1)
        print(f"first step: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        value = trainer.run(_WARM_UP - 1)
        seconds = []
        joules_before = energy.joules_so_far()
        for _ in range(_GROUPS):
            start = time.perf_counter()
            value = trainer.run(options.steps)
            seconds.append((time.perf_counter() - start) / options.steps)
        joules_after = energy.joules_so_far()
        # Read before the profiled steps: XLA may run those without command buffers.
        peak = trainer.peak_bytes()
        table = ""
        if options.profile and not in_torch:
            try:
                events = timing.record_jax(lambda: trainer.run(_PROFILED))
                busy = timing.busy_ns(events) / 1e6 / _PROFILED
                table = f"device busy {busy:.3f} ms a step\n\n{breakdown(events, _PROFILED)}"
            except timing.NoKernelsError as error:
                table = f"no profile: {error}"
    median = float(np.median(seconds))
    tokens = options.accumulate * options.batch_size * options.seq_len
    flops = tokens * _module(options).flops_per_token(model, options.seq_len)
    mfu = training.model_flops_utilization(flops, median, trainer.origin["gpu"])
    spread = f"groups {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms"
    if joules_before is not None and joules_after is not None:
        joules = (joules_after - joules_before) / (_GROUPS * options.steps)
        spread = f"{spread}; {joules:.1f} J a step"
    if options.accumulate > 1:
        spread = f"{options.accumulate} microbatches; {spread}"
    if any(options.documents):
        spread = f"packed documents of {options.documents[0]} tokens on average; {spread}"
    row = trainer.origin | {
        "step_ms": f"{median * 1e3:.3f}",
        "tokens_per_s": f"{tokens / median:.0f}",
        "mfu": "" if mfu is None else f"{mfu:.4f}",
        "peak_gib": "" if peak is None else f"{peak / 2**30:.2f}",
        "loss": f"{float(value):.4f}",
        "timer": "wall",
        "note": spread,
    }
    return {"row": row, "profile": table}


# All implementations


def run_worker(
    implementation: str,
    backend: str,
    precision: str | None,
    documents: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Runs one implementation in its own process.

    Args:
        implementation: One of :data:`IMPLEMENTATIONS`.
        backend: The backend of jaxllm; "" for the others.
        precision: The recipe of float8 of jaxllm; None for none, and for the others.
        documents: The mean length of packed documents; 0 where each row is a document, and for the
            others.
        options: The command line.

    Returns:
        Its report; after a failure, a report with the reason.
    """
    command = [sys.executable, "-m", "benchmarks.train", "--worker", implementation]
    command += ["--backend", backend] if backend else []
    command += ["--precision", str(precision).lower(), "--documents", str(documents)]
    for name in ("model", "preset", "batch_size", "seq_len", "accumulate", "steps", "dtype"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--data", str(options.data.resolve())] if options.data else []
    command += [f"--{name}" for name in ("profile", "smoke") if getattr(options, name)]
    title = _title(implementation, backend, precision, documents)
    print(f"{title} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+") as stderr:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=options.timeout,
            )
            output, status = done.stdout, f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            output, status = "", f"stopped after {options.timeout:g} s"
        stderr.seek(0)
        log = stderr.read().strip().splitlines()
    for line in output.splitlines():
        if line.startswith(_REPORT):
            return json.loads(line.removeprefix(_REPORT))
    print("\n".join([f"{implementation}: {status}", *log[-20:]]), file=sys.stderr)
    # The last lines of a traceback may be notes; the exception's own line begins with its type.
    error = next((x for x in reversed(log) if re.match(_EXCEPTION, x)), "")
    return {"row": {"note": "; ".join(filter(None, (status, error)))[:200]}, "profile": ""}


def _title(implementation: str, backend: str, precision: str | None, documents: int) -> str:
    packed = f"documents={documents}" if documents else ""
    return " ".join(filter(None, (implementation, backend, precision, packed)))


def main(argv: Sequence[str] | None = None) -> int:
    """Times the training steps; see the module's docstring."""
    from jaxllm.ops.block.precision import RECIPES

    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument(
        "--preset", help="a preset of jaxllm.models.MODEL; default: d12 of gpt2, 3.2-1b of llama3"
    )
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches; jaxllm only")
    parser.add_argument("--steps", type=int, help="steps in each of three timed groups")
    parser.add_argument(
        "--implementation", nargs="+", choices=IMPLEMENTATIONS, default=["plain", "jaxllm"]
    )
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=("auto", "cuda", "pallas", "xla"),
        default=["auto"],
        help="backends of jaxllm, one after another; default: auto",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("none", *RECIPES),
        default=["none"],
        help="float8 recipes of jaxllm, one after another; default: none",
    )
    parser.add_argument(
        "--documents",
        nargs="+",
        type=int,
        metavar="N",
        default=[0],
        help="time jaxllm on rows packed with documents of N tokens on average, for each N; 0: a "
        "row is one document; default: 0",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="a folder with train_*.bin; default: random tokens"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print the time by kernel (JAX only)"
    )
    parser.add_argument(
        "--timeout", type=float, default=280, help="seconds for each implementation"
    )
    parser.add_argument(
        "--csv", type=Path, help="default: benchmarks/results/<gpu>_train.csv; none with --smoke"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on any machine")
    parser.add_argument("--worker", choices=IMPLEMENTATIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.precision = [None if name == "none" else name for name in options.precision]
    preset, *shape = MODELS[options.model]
    options.preset = options.preset or preset
    defaults = (2, 16, 2) if options.smoke else (*shape, 20)
    check_counts(parser, options, "batch_size", "seq_len", "steps", "accumulate")
    for name, default in zip(("batch_size", "seq_len", "steps"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.accumulate > 1 and set(options.implementation) != {"jaxllm"} and not options.worker:
        parser.error("--accumulate is for --implementation jaxllm alone")
    if (least := min(options.documents)) < 0:
        parser.error(f"--documents is {least}; it must be at least 0")
    if options.data and not sorted(options.data.glob("train_*.bin")):
        parser.error(f"--data {options.data} has no train_*.bin")

    if options.worker:
        print(_REPORT + json.dumps(work(options)), flush=True)
        return 0

    presets = _presets(options)
    if options.preset not in presets:
        parser.error(f"--preset {options.preset!r} is none of {', '.join(presets)}")
    if options.model != "gpt2" and "torch_compile" in options.implementation:
        parser.error(f"--implementation torch_compile has no {options.model}")
    check_csv(parser, options.csv, COLUMNS)
    rows = []
    ours: list[tuple[str, str | None, int]] = list(
        itertools.product(options.backend, options.precision, options.documents)
    )
    jobs = [
        (implementation, backend, precision, documents)
        for implementation in options.implementation
        for backend, precision, documents in (
            ours if implementation == "jaxllm" else [("", None, 0)]
        )
    ]
    for implementation, backend, precision, documents in jobs:
        report = run_worker(implementation, backend, precision, documents, options)
        title = _title(implementation, backend, precision, documents)
        if report["profile"]:
            print(f"\n{title}: {report['profile']}\n", flush=True)
        rows.append(
            {
                "model": "smoke" if options.smoke else f"{options.model}_{options.preset}",
                "batch_size": options.batch_size,
                "seq_len": options.seq_len,
                # Another name: these rows do not compare with those of one document a row.
                "implementation": _title(implementation, "", None, documents),
                "backend": backend,
                "dtype": options.dtype if precision is None else f"{options.dtype} {precision}",
                "steps": options.steps,
            }
            | report["row"]
        )
    # A failure's row takes the provenance of the others.
    origin = next(({k: row[k] for k in PROVENANCE} for row in rows if "gpu" in row), {})
    rows = [origin | row for row in rows]
    columns = ("implementation", "backend", "dtype", "step_ms", "tokens_per_s", "mfu", "peak_gib")
    columns += ("loss", "note")
    model, batch = rows[0]["model"], f"{options.batch_size} x {options.seq_len}"
    print(f"\n{model}, {batch} tokens a step, {options.dtype}, on {origin.get('gpu', 'unknown')}")
    print(format_table(columns, [[row.get(column, "-") for column in columns] for row in rows]))
    path = options.csv
    if path is None and not options.smoke and origin:
        path = ROOT / "benchmarks" / "results" / f"{slug(origin['gpu'])}_train.csv"
    if path:
        append_rows(path, COLUMNS, rows)
        print(f"\n{len(rows)} rows appended to {path}")
    return 0 if origin else 1


if __name__ == "__main__":
    sys.exit(main())
