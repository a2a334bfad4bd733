"""Runs the kernels whose CTAs wait for one another while the GPU is shared: nothing may hang.

    python tests/share_a_gpu.py processes --seconds 60          # two processes on one GPU
    python tests/share_a_gpu.py processes --seconds 60 --mps    # both at once on its SMs

A process loops GPT-2's training step, whose row-at-once GEMMs exchange the sums of rows, and
attention's backward, in which a tile of keys waits for those before it. Each process prints a line
a second with the number of its rounds. If none comes for ``--patience`` seconds, the script ends
the processes and fails. ``docs/waits.md`` says why none can hang.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PROCESSES = 2


def attention_arguments(tokens: int, heads: int = 4):
    """q, k, v and the gradient of the output: one key head, 128 wide."""
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
    """One process: steps and attention's gradients in turn, a line a second."""
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


def watch(commands: list[list[str]], environment: dict[str, str], patience: float) -> int:
    """Runs commands at the same time; ends them all where one is silent for so long."""
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
    """Starts NVIDIA's Multi-Process Service, in folders of its own."""
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "pipe")
    environment["CUDA_MPS_LOG_DIRECTORY"] = str(folder / "log")
    for name in ("pipe", "log"):
        (folder / name).mkdir()
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)


def stop_mps(environment: dict[str, str]) -> None:
    """Ends it."""
    subprocess.run(
        ["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["processes", "loop"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--patience", type=float, default=120, help="seconds without a line")
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--batch-size", type=int, default=16, help="of GPT-2's step")
    parser.add_argument("--tokens", type=int, default=32768, help="of attention")
    options = parser.parse_args(argv)
    if options.mode == "loop":
        loop(options.seconds, options.batch_size, options.tokens)
        return 0
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    seconds = ["--seconds", str(options.seconds)]
    sizes = ["--batch-size", str(options.batch_size), "--tokens", str(options.tokens)]
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
