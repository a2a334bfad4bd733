"""Runs kernels whose CTAs wait for other CTAs on a shared GPU, and checks that none hangs.

    python tests/share_a_gpu.py processes --seconds 60          # two processes on one GPU
    python tests/share_a_gpu.py processes --seconds 60 --mps    # both at once on its SMs
    python tests/share_a_gpu.py streams --seconds 60            # one program, two streams, two GPUs

A process loops GPT-2's training step and the attention backward. In the step, GEMMs with a layer
norm epilogue exchange row sums between CTAs. In the backward, a key tile waits for earlier key
tiles. Each process prints its number of rounds every second. If it is silent for ``--patience``
seconds, the script kills the processes and fails. ``docs/waits.md`` explains why no kernel hangs.

With ``streams``, one program runs those GEMMs on one stream of each GPU, the attention backward on
another, and NCCL all-reduces at the same time. Its results must be bit-identical in each round.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PROCESSES = 2


def attention_arguments(tokens: int, heads: int = 4):
    """q, k, v and dout, with one key head and head width 128."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (heads, 1, 1, heads)
    return [
        jax.random.normal(key, (1, tokens, size, 128), jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    ]


def attention_gradients(q, k, v, dout):
    """The gradients of causal attention."""
    import jax

    from jaxllm.ops import flash_attention

    return jax.vjp(lambda *qkv: flash_attention(*qkv, causal=True), q, k, v)[1](dout)


def make_step(batch_size: int):
    """GPT-2 124M's training step, and its state."""
    import jax
    import jax.numpy as jnp

    from jaxllm import training
    from jaxllm.models import gpt2

    config = gpt2.PRESETS["d12"]
    optimizer = training.adamw(6e-4)
    state = training.init_state(
        gpt2.init(jax.random.key(0), config), optimizer, copy_dtype="bfloat16"
    )
    step = training.make_train_step(
        lambda params, tokens, labels: gpt2.loss(params, tokens, labels, config),
        optimizer,
        compute_dtype="bfloat16",
    )
    shape = (1, batch_size, 1024)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size, jnp.int32)
    return step, state, tokens


def loop(seconds: float, batch_size: int, tokens: int) -> None:
    """One process: alternates training steps and attention gradients; prints a line per second."""
    import jax

    import jaxllm

    step, state, batch = make_step(batch_size)
    arguments = attention_arguments(tokens)
    gradients = jax.jit(attention_gradients)
    calls = jaxllm.explain(attention_gradients, *arguments).calls
    print("kernels", *(f"{call.stem}:{call.on_gpu}" for call in calls), flush=True)
    rounds, losses, said = 0, [], 0.0
    jax.block_until_ready(gradients(*arguments))
    state, metrics = step(state, batch, batch)
    jax.block_until_ready(metrics)
    print("compiled", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state, metrics = step(state, batch, batch)
        found = [gradients(*arguments) for _ in range(4)]
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(found)
        rounds += 1
        if time.monotonic() - said > 1:
            said = time.monotonic()
            print(f"rounds {rounds} loss {losses[-1]:.4f}", flush=True)
    assert losses[-1] < losses[0], losses
    print(f"done {rounds} loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)


def stream_program(rows: int, tokens: int, heads: int = 4, matmuls: int = 24, repeats: int = 2):
    """The program with two streams and all-reduces, and its arguments.

    XLA ignores a stream annotation for calls inside the annotated function. So the program calls
    the kernels directly, instead of the ops, which JAX traces as calls.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.compute_on import compute_on
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from jaxllm.ops.attention import cuda as attention
    from jaxllm.ops.gemm import cuda_fused as gemm

    width = 768
    options = {"causal": True, "scale": 128**-0.5, "window": None, "softcap": None}
    forward = functools.partial(attention.flash_attention_forward, segment_ids=None, **options)

    def multiply(x, weight, bias, *norm):
        for _ in range(matmuls):
            _, norm = gemm.matmul_residual_norm(x, weight, bias, x, norm, eps=1e-5)
        return norm

    def differentiate(q, k, v, out, lse, dout):
        for _ in range(repeats):
            gradients = attention.flash_attention_backward(q, k, v, out, lse, dout, None, **options)
            dout = gradients[0]
        return gradients

    def on_stream(i, fn):
        space = jax.memory.Space.Device
        annotate: Any = compute_on  # the signature of JAX 0.11
        return annotate(fn, compute_type=f"gpu_stream:{i}", out_memory_spaces=space)

    def program(matmul_args, attention_args, shard):
        first = on_stream(1, multiply)(*matmul_args)
        second = on_stream(2, differentiate)(*attention_args)
        for _ in range(6):
            shard = jax.lax.psum(shard, "gpu") * 0.5
        return first, second, shard

    mesh = jax.make_mesh((2,), ("gpu",), axis_types=(AxisType.Auto,))
    everywhere, split = PartitionSpec(), PartitionSpec("gpu")
    x, x_hat = jax.random.normal(jax.random.key(0), (2, rows, width), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16) * width**-0.5
    statistics = jnp.zeros(rows), jnp.ones(rows)
    q, k, v, dout = attention_arguments(tokens, heads)
    out, lse = jax.jit(forward)(q, k, v)
    arguments = (
        ((x, weight, jnp.zeros(width, x.dtype), x_hat, *statistics), everywhere),
        ((q, k, v, out, lse, dout), everywhere),
        (jnp.ones(1 << 26), split),
    )
    placed = [jax.device_put(tree, NamedSharding(mesh, spec)) for tree, spec in arguments]
    sharded = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=tuple(spec for _, spec in arguments),
        out_specs=everywhere,
        check_vma=False,
    )
    return jax.jit(sharded), placed


def loop_streams(seconds: float, tokens: int) -> None:
    """One process on two GPUs: repeats the program; prints a line per second."""
    import jax
    import jax.numpy as jnp

    program, arguments = stream_program(32768, tokens)
    expected = jax.block_until_ready(program(*arguments))
    print("compiled", flush=True)
    rounds, said, end = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        results = jax.block_until_ready(program(*arguments))
        rounds += 1
        if time.monotonic() - said > 1:
            said = time.monotonic()
            assert jax.tree.all(jax.tree.map(jnp.array_equal, results, expected)), rounds
            print(f"rounds {rounds}", flush=True)
    print(f"done {rounds}", flush=True)


def watch(commands: list[list[str]], environment: dict[str, str], patience: float) -> int:
    """Runs commands concurrently; kills them all if one is silent for ``patience`` seconds."""
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
    children = []
    for i, command in enumerate(commands):
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        children.append(child)

        def read(i=i, stdout=child.stdout):
            for line in stdout or ():
                lines.put((i, line.rstrip()))
            lines.put((i, None))

        threading.Thread(target=read, daemon=True).start()
    heard = dict.fromkeys(range(len(children)), time.monotonic())
    finished: set[int] = set()
    while len(finished) < len(children):
        try:
            i, line = lines.get(timeout=1)
        except queue.Empty:
            pass
        else:
            heard[i] = time.monotonic()
            if line is None:
                finished.add(i)
            else:
                print(f"[{i}] {line}", flush=True)
        silent = [i for i in heard if i not in finished and time.monotonic() - heard[i] > patience]
        if silent:
            print(f"hung: processes {silent} were silent for {patience:g} s", flush=True)
            for child in children:
                child.kill()
            return 1
    return max(abs(child.wait()) for child in children)


def start_mps(environment: dict[str, str]) -> None:
    """Starts NVIDIA's Multi-Process Service with temporary folders."""
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "pipe")
    environment["CUDA_MPS_LOG_DIRECTORY"] = str(folder / "log")
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)


def stop_mps(environment: dict[str, str]) -> None:
    """Stops the Multi-Process Service."""
    subprocess.run(
        ["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["processes", "streams", "loop", "loop-streams"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--patience", type=float, default=120, help="seconds without a line")
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--batch-size", type=int, default=16, help="of GPT-2's step")
    parser.add_argument("--tokens", type=int, default=32768, help="of attention")
    options = parser.parse_args(argv)
    if options.mode == "loop":
        loop(options.seconds, options.batch_size, options.tokens)
        return 0
    if options.mode == "loop-streams":
        loop_streams(options.seconds, options.tokens)
        return 0
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    seconds = ["--seconds", str(options.seconds)]
    sizes = ["--batch-size", str(options.batch_size), "--tokens", str(options.tokens)]
    if options.mode == "streams":
        child = [sys.executable, __file__, "loop-streams", *seconds, *sizes]
        return watch([child], environment, options.patience)
    child = [sys.executable, __file__, "loop", *seconds, *sizes]
    if not options.mps:
        return watch([child] * PROCESSES, environment, options.patience)
    start_mps(environment)
    try:
        return watch([child] * PROCESSES, environment, options.patience)
    finally:
        stop_mps(environment)


if __name__ == "__main__":
    sys.exit(main())
