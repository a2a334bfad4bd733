"""Times prefill and decoding of a Llama 3 at batch 1, all decode steps in one compiled program.

    python -m benchmarks.generate --preset 3.2-1b --context 2048 --dtype bfloat16 int8

Prints the latency of a token, and its share of the time that reading the weights and the cache once
would take at ``--bandwidth``. Weights are random: how fast a model decodes does not hang on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models import llama3
from jaxllm.models.blocks import for_decoding
from jaxllm.quantize import quantize_params, size_in_bytes


def random_params(config: llama3.Llama3Config, int8: bool) -> dict[str, Any]:
    """Parameters laid out for decoding, made where they are used."""

    def make(key):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), llama3.init(key, config))
        return for_decoding(quantize_params(params) if int8 else params)

    return jax.jit(make)(jax.random.key(0))


def decode(params: Any, cache: Any, token: jax.Array, config: Any, steps: int):
    """Greedy search for some steps."""

    def step(_, carry):
        token, cache = carry
        logits, cache = llama3.decode_step(params, token, config, cache)
        return jnp.argmax(logits[:, : config.vocab_size], axis=-1).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, step, (token, cache))


def read_bytes(params: Any, cache: Any, config: llama3.Llama3Config) -> int:
    """What a step must read: all but the rows of a token table that is not the head."""
    table = params["wte"].nbytes if "head" in params else 0
    return size_in_bytes(params) - table + size_in_bytes(cache)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="3.2-1b", choices=llama3.PRESETS)
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--context", type=int, default=2048, help="tokens when decoding ends")
    parser.add_argument("--steps", type=int, default=64, help="tokens to decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefill", action="store_true", help="time the prompt as well")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "int8"])
    parser.add_argument("--bandwidth", type=float, default=4.27, help="TB/s of a copy on this GPU")
    args = parser.parse_args(argv)
    config = llama3.PRESETS[args.preset]
    if args.layers:
        config = dataclasses.replace(config, layers=args.layers)
    prompt = args.context - args.steps
    if prompt < 1 or args.repeats < 1:
        parser.error("--context must be above --steps, and --repeats at least 1")

    for dtype in args.dtype:
        params = random_params(config, dtype == "int8")
        cache = llama3.empty_cache(config, 1, args.context, jnp.bfloat16)
        token = jnp.zeros(1, jnp.int32)
        if args.prefill:
            tokens = jnp.ones((1, prompt), jnp.int32)
            prefill = jax.jit(llama3.prefill, static_argnums=3)
            lengths = jnp.array([prompt])
            seconds = _time(functools.partial(prefill, params, tokens, lengths, config, cache))
            print(f"{args.preset} {dtype} prefill of {prompt}: {1e3 * seconds:.2f} ms", flush=True)
        run = jax.jit(
            functools.partial(decode, config=config, steps=args.steps), donate_argnames="cache"
        )
        cache = cache._replace(lengths=jnp.full(1, prompt, jnp.int32))
        best = float("inf")
        for _ in range(args.repeats + 1):
            start = time.perf_counter()
            token, cache = jax.block_until_ready(run(params, cache, token))
            best = min(best, (time.perf_counter() - start) / args.steps)
            cache = cache._replace(lengths=jnp.full(1, prompt, jnp.int32))
        limit = read_bytes(params, cache, config) / (args.bandwidth * 1e12)
        print(
            f"{args.preset} {dtype} decode at {args.context}: {1e3 * best:.3f} ms a token, "
            f"{limit / best:.3f} of the read limit {1e3 * limit:.3f} ms",
            flush=True,
        )


def _time(fn) -> float:
    best = float("inf")
    for _ in range(3):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready(fn())
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
