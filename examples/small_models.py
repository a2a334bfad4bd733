"""Options, data and the timing loop of the examples that train models of other libraries."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from generate import check_backend

import jaxllm
from jaxllm import data
from jaxllm.data.tokenizer import BYTES

Step = Callable[..., tuple[Any, jax.Array]]  # (state, tokens, labels) -> (state, loss)

WARM_UP = 2  # steps that are not timed; the first one compiles
SMOKE = {"layers": 1, "width": 32, "heads": 2, "seq_len": 32, "batch_size": 4}
SMOKE |= {"steps": 8, "learning_rate": 1e-2}


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """The options of a run.

    Args:
        argv: The arguments; None for ``sys.argv``.
        description: What the script does, for ``--help``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--plain", action="store_true", help="without jaxllm.nn")
    add("--explain", action="store_true", help="list what implements each call of jaxllm.nn first")
    add("--layers", type=int, default=2)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--vocab-size", type=int, default=BYTES.vocab_size, help="tokens are bytes in any case")
    add("--seq-len", type=int, default=128)
    add("--batch-size", type=int, default=16)
    add("--steps", type=int, default=50)
    add("--learning-rate", type=float, default=1e-3)
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a few steps of a tiny model")
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**SMOKE)
    options = parser.parse_args(argv)
    check_backend(None, parser)
    for name in ("layers", "width", "heads", "seq_len", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; at least 1")
    if options.width % options.heads:
        parser.error(f"--width is {options.width}; it must be a multiple of --heads")
    if options.vocab_size < BYTES.vocab_size:
        parser.error(f"--vocab-size is {options.vocab_size}; at least {BYTES.vocab_size}")
    if options.steps <= WARM_UP:
        parser.error(f"--steps is {options.steps}; at least {WARM_UP + 1}")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed is {options.seed}; from 0 to 2**63 - 1")
    if not 0 <= options.learning_rate < math.inf:
        parser.error(f"--learning-rate is {options.learning_rate}; finite and at least 0")
    return options


def open_data() -> data.Dataset:
    """The sources of Python's standard library in the folder that Python runs from, as bytes."""
    paths = sorted(Path(data.standard_library()).glob("*.py"))
    ends = np.array([BYTES.end_of_text], np.uint16)
    parts = [part for path in paths for part in (BYTES.encode(path.read_bytes()), ends)]
    return data.Dataset((np.concatenate(parts),), "standard library")


def train(step: Step, state: Any, options: argparse.Namespace) -> tuple[Any, list[float], float]:
    """Takes the steps of a run.

    Args:
        step: The training step, compiled by ``jax.jit``; it donates its state.
        state: The parameters and the optimizer's state.
        options: Those of :func:`parse`.

    Returns:
        The last state, the loss of each step, and the seconds per step after the warm-up.
    """
    dataset, began, losses = open_data(), 0.0, []
    for i in range(options.steps):
        if i == WARM_UP:
            jax.block_until_ready((state, losses))
            began = time.perf_counter()
        tokens, labels = data.batch(
            dataset, options.batch_size, options.seq_len, seed=options.seed, step=i
        )
        # The host does not wait for a loss, so it prepares a batch while the device computes.
        state, loss = step(state, tokens, labels)
        losses.append(loss)
    jax.block_until_ready((state, losses))
    seconds = (time.perf_counter() - began) / (options.steps - WARM_UP)
    return state, [float(loss) for loss in losses], seconds


def main(
    argv: Sequence[str] | None,
    description: str,
    make_step: Callable[[argparse.Namespace], tuple[Any, Step]],
) -> None:
    """Trains a model, and prints losses and times.

    Args:
        argv: The arguments; None for ``sys.argv``.
        description: What the script does, for ``--help``.
        make_step: Makes the initial state and the training step from the options.
    """
    options = parse(argv, description)
    state, step = make_step(options)
    functions = "plain functions" if options.plain else "jaxllm.nn"
    print(f"On {jax.devices()[0].device_kind}, in {options.dtype}, with {functions}.")
    if options.explain:
        tokens = jax.ShapeDtypeStruct((options.batch_size, options.seq_len), np.int32)
        print(jaxllm.explain(step, state, tokens, tokens))
    _, losses, seconds = train(step, state, options)
    every = max(1, options.steps // 10)
    for i, loss in enumerate(losses, 1):
        if i in (1, options.steps) or i % every == 0:
            print(f"step {i:5}  loss {loss:.4f}")
    tokens = options.batch_size * options.seq_len
    print(f"{1000 * seconds:.2f} ms/step, {tokens / seconds:,.0f} tokens/s")
