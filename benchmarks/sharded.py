"""Times a training step on several GPUs of one host beside one GPU.

And the loss of an LM head whose vocabulary is sharded over the GPUs, and attention of one long
sequence in shards, forward and backward.

``python -m benchmarks.sharded`` runs :data:`RUNS` and appends its rows to
``benchmarks/results/<gpu>_sharded.csv``. Each run has a process of its own, or one for each GPU.
Those of one GPU, then those of several, compile at once, and one after another has the GPUs to
itself; the large ones come by themselves. At last the common steps on one GPU are timed once more:
GPUs get slower as they warm up. All processes share XLA's choices of kernels, which it times anew
in each process otherwise.

The batch of a training step grows with the GPUs along ``data`` and ``fsdp``; that of an op does
not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks import timing, train
from benchmarks.arguments import check_counts, check_csv
from benchmarks.record import PROVENANCE, ROOT, append_rows, format_table, provenance, slug

COLUMNS = (
    *PROVENANCE,
    *("model", "batch_size", "seq_len", "implementation", "mesh", "axes", "processes", "gpus"),
    *("step_ms", "tokens_per_s", "peak_gib", "state_gib", "loss", "steps", "note"),
)
LM_HEAD = "lm_head"  # linear_cross_entropy of 32 sequences of 1024, with both gradients
_LM_HEAD_SIZES = 2560, 128256  # width and vocabulary
# With the backward, and without. The shape is that of Llama 3.1 8B.
ATTENTION = ("attention", "attention_forward")
_LENGTH, _HEADS, _KV_HEADS, _WIDTH = 65_536, 32, 8, 128
OPS = (LM_HEAD, *ATTENTION)


class Step(NamedTuple):
    """A training step.

    Attributes:
        model: ``"gpt2"`` or ``"llama3"``.
        preset: Its size.
        batch_size: Sequences of each part along ``data`` and ``fsdp``.
        seq_len: Their tokens.
        layers: How many layers; None for those of the preset.
        remat: Whether the backward recomputes all of a block but attention.
        is_large: Whether it needs the memory that other processes keep after they have compiled.
        warm_up: Steps before the timed ones. For some seconds: a GPU that is limited by its power
            is at first about 1% faster.
        steps: Steps in each timed group; None for ``--steps``.
    """

    model: str
    preset: str
    batch_size: int
    seq_len: int
    layers: int | None = None
    remat: bool = False
    is_large: bool = False
    warm_up: int = 20
    steps: int | None = None


STEPS = {
    "gpt2": Step("gpt2", *train.MODELS["gpt2"], warm_up=100),
    "gpt2_1558m": Step("gpt2", "d48", 16, 1024),
    "llama3": Step("llama3", *train.MODELS["llama3"]),
    "llama3_128k": Step("llama3", "3.2-1b", 1, 2**17, remat=True, warm_up=1, steps=1),
    "llama3_256k": Step("llama3", "3.2-1b", 1, 2**18, remat=True, warm_up=1, steps=1),
    # The state of all layers takes 52 GiB on each of two GPUs.
    "llama3_half_8b": Step("llama3", "3.1-8b", 2, 4096, layers=16, is_large=True),
    "llama3_8b": Step("llama3", "3.1-8b", 1, 8192, is_large=True, warm_up=8, steps=6),
}
MODELS = (*STEPS, *OPS)
_LIMIT_S = 300.0  # for a compilation, and for a run: a GPU without memory leaves others waiting
_GROUPS = 3  # timed runs of --steps steps; the median is reported
_PROFILED = 2
_REPORT = "SHARDED-REPORT "
_READY = "SHARDED-READY"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        model: One of :data:`MODELS`.
        mesh: The axis along which all GPUs are: ``"data"`` or ``"fsdp"``, ``"tensor"``, for
            :data:`LM_HEAD` the vocabulary's, or ``"context"``. Or several, such as
            ``"fsdp,tensor=2"``. "" for one GPU.
        axes: ``"auto"`` or ``"explicit"``.
        implementation: ``"jaxllm"``, or ``"plain"`` for plain JAX.
        processes: Whether each GPU has a process.
    """

    model: str
    mesh: str = "data"
    axes: Literal["auto", "explicit"] = "auto"
    implementation: str = "jaxllm"
    processes: bool = False


RUNS = (
    Run("gpt2", mesh=""),
    Run("gpt2"),
    Run("gpt2", axes="explicit"),
    Run("gpt2", processes=True),
    Run("gpt2", mesh="fsdp"),
    Run("gpt2", implementation="plain"),
    Run("gpt2_1558m", mesh="fsdp"),
    Run("llama3", mesh=""),
    Run("llama3"),
    Run("llama3", mesh="fsdp"),
    Run("llama3", mesh="tensor"),
    Run("llama3", mesh="tensor", axes="explicit"),
    Run("llama3_128k", mesh=""),
    Run("llama3_128k", mesh="context"),
    Run("llama3_256k", mesh="context"),
    Run("llama3_half_8b", mesh="fsdp"),
    Run("llama3_8b", mesh="fsdp,tensor=2"),
    Run("llama3_8b", mesh="fsdp"),
    Run(LM_HEAD, mesh=""),
    Run(LM_HEAD, mesh="tensor"),
    Run(LM_HEAD, mesh="tensor", axes="explicit"),
    *(Run(model, mesh=mesh) for model in ATTENTION for mesh in ("", "context")),
)


# One process


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Compiles one run, waits for a line on the standard input, and times it."""
    import jax

    run = Run(**json.loads(options.worker))
    if run.processes:
        address = f"127.0.0.1:{options.port}"
        local = None if options.smoke else [options.process]  # a CPU's devices are its own
        jax.distributed.initialize(address, options.gpus, options.process, local_device_ids=local)

    import jaxllm
    from jaxllm import training
    from jaxllm.training import parallel

    count = options.gpus if run.mesh else 1
    axes = (part if "=" in part else f"{part}=-1" for part in (run.mesh or "data").split(","))
    sizes = parallel.parse_mesh(",".join(axes))
    mesh = parallel.make_mesh(**sizes, axis_type=run.axes, devices=jax.devices()[:count])
    if run.model == LM_HEAD:
        prepare = _prepare_lm_head
        of = Step(LM_HEAD, "x".join(map(str, _LM_HEAD_SIZES)), 32, 1024)
    elif run.model in ATTENTION:
        prepare = _prepare_attention
        of = Step("attention", f"{_HEADS}x{_KV_HEADS}x{_WIDTH}", 1, _LENGTH)
    else:
        prepare, of = _prepare, STEPS[run.model]
    if options.smoke:
        of = of._replace(batch_size=1 if run.model in ATTENTION else 2, seq_len=16)
    shape = argparse.Namespace(
        **of._asdict() | {"batch_size": of.batch_size * mesh.shape["data"] * mesh.shape["fsdp"]},
        dtype="bfloat16",
        data=None,
        smoke=options.smoke,
        worker="plain_unrolled",
    )
    steps = of.steps or options.steps
    with jax.set_mesh(mesh), jaxllm.use_backend(options.backend):
        compiled, create, batches = prepare(run, shape, mesh)
        print(_READY, flush=True)
        sys.stdin.readline()
        state, loss = create(), np.nan

        def run_steps(count: int) -> float:
            nonlocal state, loss
            start = time.perf_counter()
            for i in range(count):
                state, loss = compiled(state, *batches[i % len(batches)])
            jax.block_until_ready((state, loss))
            return (time.perf_counter() - start) / count

        run_steps(2 if options.smoke else of.warm_up)
        seconds = [run_steps(steps) for _ in range(_GROUPS)]
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    value: Any = loss["loss"] if isinstance(loss, dict) else loss
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    median = float(np.median(seconds))
    note = f"groups {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms"
    if options.profile and count > 1:
        profiled = min(_PROFILED, steps)
        events = timing.record_jax(lambda: run_steps(profiled), gpu="0")
        note += f"; communication exposed {timing.exposed_ns(events) / 1e6 / profiled:.2f} ms"
    peak_flops = training.peak_flops(jax.devices()[0].device_kind)
    if run.model not in OPS and peak_flops is not None:
        flops = train._module(shape).flops_per_token(_model(shape), of.seq_len)
        speed = shape.batch_size * of.seq_len / median
        note += f"; MFU {flops * speed / (peak_flops * count):.3f}"
    return provenance() | {
        "model": "smoke" if options.smoke else f"{run.model}_{of.preset}",
        "batch_size": shape.batch_size,
        "seq_len": of.seq_len,
        "implementation": run.implementation,
        "mesh": ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1),
        "axes": run.axes if run.mesh else "",
        "processes": jax.process_count(),
        "gpus": count,
        "step_ms": f"{median * 1e3:.3f}",
        "tokens_per_s": f"{shape.batch_size * of.seq_len / median:.0f}",
        "peak_gib": "" if peak is None else f"{peak / 2**30:.2f}",
        "state_gib": f"{own / 2**30:.2f}",
        "loss": f"{float(value):.4f}",
        "steps": steps,
        "note": note,
    }


def _model(shape: argparse.Namespace) -> Any:
    """The model's configuration."""
    model = train._model(shape)
    return dataclasses.replace(model, layers=shape.layers or model.layers)


def _prepare(run: Run, shape: argparse.Namespace, mesh: Any) -> tuple[Any, Any, list[Any]]:
    """The compiled step, the function that creates its state, and batches."""
    import jax
    import jax.numpy as jnp

    from jaxllm import training
    from jaxllm.models.common import SAVE_ATTENTION, unstack
    from jaxllm.training import parallel

    module, model = train._module(shape), _model(shape)
    remat = shape.remat and SAVE_ATTENTION
    is_plain = run.implementation == "plain"
    sharding = parallel.batch_sharding(mesh, accumulate=not is_plain)
    leading = () if is_plain else (1,)
    if is_plain:
        steps: list[Any] = []

        def make() -> Any:
            state, step = train._plain(shape, model)
            steps.append(step)
            return state

        shapes = jax.eval_shape(make)
        shardings = jax.tree.map(lambda _: parallel.replicated(mesh), shapes)
        step, create = steps[0], jax.jit(make, out_shardings=shardings)
    else:
        optimizer = training.adamw(train.LEARNING_RATES[shape.model])

        def init() -> Any:
            return module.init(jax.random.key(0), model)

        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            return module.loss(params, tokens, labels, model, remat=remat)

        def create() -> Any:
            return parallel.init_state(mesh, init, optimizer, unroll=True, copy_dtype="bfloat16")

        shapes = jax.eval_shape(
            lambda: training.init_state(unstack(init()), optimizer, copy_dtype="bfloat16")
        )
        shardings = parallel.state_shardings(mesh, shapes)
        step = training.make_train_step(
            loss,
            optimizer,
            compute_dtype="bfloat16",
            shardings=shardings,
            overlap=shape.model != "gpt2",
        )
    like = jax.tree.map(
        lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of), shapes, shardings
    )
    size = (*leading, shape.batch_size, shape.seq_len)
    tokens = jax.ShapeDtypeStruct(size, jnp.int32, sharding=sharding)
    step = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=0)
    compiled = step.lower(like, tokens, tokens).compile()
    made = train._batches(shape, model.vocab_size)
    arrays = [tuple(x.reshape(*leading, *x.shape) for x in pair) for pair in made]
    return compiled, create, [parallel.put(sharding, pair) for pair in arrays]


def _prepare_lm_head(run: Run, shape: argparse.Namespace, mesh: Any) -> tuple[Any, Any, list[Any]]:
    """Likewise of the LM head; the state is its input and its weight."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from jaxllm import ops

    width, vocab_size = (32, 256) if shape.smoke else _LM_HEAD_SIZES
    rows = shape.batch_size * shape.seq_len
    whole, in_shards = NamedSharding(mesh, P()), NamedSharding(mesh, P("tensor", None))

    def create() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        hidden, weight = (
            0.02 * jax.random.normal(key, (size, width), jnp.bfloat16)
            for key, size in zip(keys, (rows, vocab_size), strict=True)
        )
        return hidden * 50, weight

    def step(state: Any, labels: jax.Array) -> tuple[Any, dict[str, Any]]:
        def loss(hidden: jax.Array, weight: jax.Array) -> jax.Array:
            return ops.linear_cross_entropy(hidden, weight, labels, transpose_weight=True)

        value, gradients = jax.value_and_grad(loss, (0, 1))(*state)
        return state, {"loss": value, "gradients": gradients}

    shardings = whole, in_shards
    like = jax.tree.map(
        lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of),
        jax.eval_shape(create),
        shardings,
    )
    labels = np.random.default_rng(0).integers(0, vocab_size, rows).astype(np.int32)
    labels = jax.device_put(labels, whole)
    out = (shardings, {"loss": whole, "gradients": shardings}) if run.axes == "auto" else None
    compiled = jax.jit(step, out_shardings=out).lower(like, labels).compile()
    return compiled, jax.jit(create, out_shardings=shardings), [(labels,)]


def _prepare_attention(
    run: Run, shape: argparse.Namespace, mesh: Any
) -> tuple[Any, Any, list[Any]]:
    """Likewise of attention: its state is q, k, v and the gradient of its output."""
    import jax

    from jaxllm import ops

    sharding = jax.NamedSharding(mesh, jax.P(None, "context"))
    heads = (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
    sizes = [(shape.batch_size, shape.seq_len, count, _WIDTH) for count in heads]

    def create() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(sizes))
        pairs = zip(keys, sizes, strict=True)
        return [jax.random.normal(key, size, shape.dtype) for key, size in pairs]

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        def attend(*qkv: jax.Array) -> jax.Array:
            return ops.flash_attention(*qkv, causal=True)

        if run.model == "attention_forward":
            out, gradients = attend(q, k, v), ()
        else:
            out, pull = jax.vjp(attend, q, k, v)
            gradients = pull(dout)
        # The number in the row's "loss": of the first query, which sees the first key alone.
        return {"loss": out[0, 0, 0, 0], "out": out, "gradients": gradients}

    create = jax.jit(create, out_shardings=[sharding] * len(sizes))
    like = [jax.ShapeDtypeStruct(size, shape.dtype, sharding=sharding) for size in sizes]
    compiled = jax.jit(step).lower(*like).compile()
    return lambda state: (state, compiled(*state)), create, [()]


# All of them


def _start(run: Run, process: int, port: int, options: argparse.Namespace) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.sharded", "--worker"]
    command += [json.dumps(dataclasses.asdict(run)), "--process", str(process)]
    command += ["--port", str(port), "--gpus", str(options.gpus), "--steps", str(options.steps)]
    command += ["--backend", options.backend]
    command += [f"--{flag}" for flag in ("profile", "smoke") if getattr(options, flag)]
    # All hold a GPU at once, so none may reserve its memory; one after another may need all of it.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", "JAX_COMPILATION_CACHE_DIR": options.cache}
    if options.smoke:
        count = 1 if run.processes else options.gpus
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **pipes)


def _read(process: subprocess.Popen, word: str) -> str | None:
    """The line of a process's output that begins with a word; None where there is none in time."""
    assert process.stdout is not None
    timer = threading.Timer(_LIMIT_S, process.kill)
    timer.start()
    try:
        return next((line for line in process.stdout if line.startswith(word)), None)
    finally:
        timer.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Times the runs; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mesh", nargs="+", help="runs on these meshes alone, one GPU's as well")
    parser.add_argument("--backend", choices=("auto", "cuda", "pallas", "xla"), default="cuda")
    parser.add_argument("--steps", type=int, default=20, help="in each of three timed groups")
    parser.add_argument(
        "--csv", type=Path, help="default: benchmarks/results/<gpu>_sharded.csv; none with --smoke"
    )
    parser.add_argument(
        "--profile", action="store_true", help="note how long a step only communicates"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny models, on any machine")
    for name, kind in (("--worker", str), ("--process", int), ("--port", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        row = work(options)
        print(_REPORT + json.dumps(row), flush=True)
        return 0
    check_counts(parser, options, "gpus", "steps")
    known = dict.fromkeys(run.mesh for run in RUNS if run.mesh and run.model in options.model)
    if unknown := [mesh for mesh in options.mesh or () if mesh not in known]:
        parser.error(f"--mesh {unknown[0]!r} is none of {'  '.join(known)}")
    check_csv(parser, options.csv, COLUMNS)
    meshes = options.mesh and ["", *options.mesh]
    runs = [
        run for run in RUNS if run.model in options.model and (not meshes or run.mesh in meshes)
    ]
    on_one, on_all = [run for run in runs if not run.mesh], [run for run in runs if run.mesh]
    large = [run for run in on_all if run.model in STEPS and STEPS[run.model].is_large]
    waves = [on_one, [run for run in on_all if run not in large], *([run] for run in large)]
    if not options.smoke:
        waves.append([run for run in on_one if run.model in train.MODELS])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as options.cache:
        for row in itertools.chain.from_iterable(_time(wave, options) for wave in waves):
            rows.append(row)
            _save(row, options)
    columns = ("model", "implementation", "mesh", "axes", "processes", "step_ms", "tokens_per_s")
    columns += ("peak_gib", "state_gib", "loss")
    print(format_table(columns, [[str(row[column]) for column in columns] for row in rows]))
    return 0 if len(rows) == sum(map(len, waves)) else 1


def _save(row: dict[str, Any], options: argparse.Namespace) -> None:
    path = options.csv
    if path is None and not options.smoke:
        path = ROOT / "benchmarks" / "results" / f"{slug(row['gpu'])}_sharded.csv"
    if path:
        append_rows(path, COLUMNS, [row])


def _time(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of runs that compile at once, and are timed one after another."""
    started = [
        [_start(run, i, 9911 + at, options) for i in range(options.gpus if run.processes else 1)]
        for at, run in enumerate(runs)
    ]
    for processes in started:
        for process in processes:
            _read(process, _READY)
    for run, processes in zip(runs, started, strict=True):
        for process in processes:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.write("\n")
                process.stdin.flush()
        reports = [_read(process, _REPORT) for process in processes]
        for process in processes:
            process.communicate()  # to its end, which closes the pipes
        statuses = [process.returncode for process in processes]
        if reports[0] is None:
            print(f"{run}: exit status {statuses}", file=sys.stderr)
        else:
            row = json.loads(reports[0].removeprefix(_REPORT))
            print(*(row[x] for x in ("model", "mesh", "axes", "step_ms")), flush=True)
            yield row


if __name__ == "__main__":
    sys.exit(main())
