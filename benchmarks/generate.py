"""Times prefill and decoding of Llama 3 at batch 1.

    python -m benchmarks.generate --preset 3.2-1b 3.1-8b --dtype bfloat16 int8 --backend auto xla

Prefill reads a prompt into an empty cache, in one compiled program. Its limit is the time of its
GEMMs and scores at the rate of a large matmul. Decoding continues the prompt, all steps in one
compiled program. Its limit is the time to read the weights and the cache once per token at copy
bandwidth. Both limits are measured in the same run. Times are wall clock, the best of --repeats.
Weights are random; speed does not depend on their values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxllm
from benchmarks import timing
from benchmarks.arguments import check_counts
from benchmarks.record import format_table
from jaxllm.core.backend import BACKENDS
from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.inference.quantize import quantize_params, size_in_bytes
from jaxllm.models import llama3
from jaxllm.models.common import for_decoding

HEADER = ("model", "dtype", "ms", "tokens/s", "limit ms", "limit / ms", "phase, backend")


def random_params(config: llama3.Llama3Config, int8: bool) -> dict[str, Any]:
    """Parameters laid out for decoding, created on the device."""

    def make(key):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), llama3.init(key, config))
        return for_decoding(quantize_params(params) if int8 else params)

    return jax.jit(make)(jax.random.key(0))


def decode(params: Any, cache: Any, token: jax.Array, config: Any, steps: int):
    """Greedy decoding for ``steps`` steps."""

    def step(_, carry):
        token, cache = carry
        logits, cache = decode_step(llama3, params, token, config, cache)
        return jnp.argmax(logits[:, : config.vocab_size], axis=-1).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, step, (token, cache))


def read_bytes(params: Any, cache: Any) -> int:
    """The bytes that a step must read: all but a token table that is not the LM head."""
    table = params["wte"].nbytes if "lm_head" in params else 0
    return size_in_bytes(params) - table + size_in_bytes(cache)


def prefill_flops(config: llama3.Llama3Config, tokens: int) -> int:
    """Operations of a prompt's forward: the LM head for its last token, half of the scores."""
    lm_head = 2 * config.padded_vocab_size * config.width
    gemms = llama3.flops_per_token(config, 0) // 3 - lm_head
    scores = 2 * config.layers * tokens * config.width
    return (gemms + scores) * tokens + lm_head


def time_prefill(params: Any, cache: Any, config: Any, repeats: int) -> tuple[float, Any]:
    """Seconds to fill the cache with a prompt, and the cache."""
    tokens = jax.random.randint(jax.random.key(1), (1, cache.max_length), 0, config.vocab_size)
    run = jax.jit(functools.partial(prefill, llama3), static_argnums=3, donate_argnums=4)

    def once(cache):
        return run(params, tokens, jnp.full(1, tokens.shape[1]), config, cache)[1]

    return best_time(once, cache, repeats)


def time_decoding(params: Any, cache: Any, config: Any, steps: int, repeats: int) -> float:
    """Seconds per token, for the last ``steps`` tokens that fill the cache."""
    run = jax.jit(functools.partial(decode, config=config, steps=steps), donate_argnums=1)

    def once(cache):
        before = cache._replace(lengths=jnp.full(1, cache.max_length - steps, jnp.int32))
        return run(params, before, jnp.zeros(1, jnp.int32))[1]

    return best_time(once, cache, repeats)[0] / steps


def best_time(once: Callable[[Any], Any], cache: Any, repeats: int) -> tuple[float, Any]:
    """The shortest run after the first, which compiles; each run takes the last one's cache."""
    cache = jax.block_until_ready(once(cache))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        cache = jax.block_until_ready(once(cache))
        times.append(time.perf_counter() - start)
    return min(times), cache


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", nargs="+", default=["3.2-1b"], choices=llama3.PRESETS)
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has")
    parser.add_argument("--context", type=int, default=2048, help="tokens of prompt and cache")
    parser.add_argument("--steps", type=int, default=64, help="tokens of the context to decode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "int8"])
    parser.add_argument("--backend", nargs="+", default=["auto"], choices=BACKENDS)
    args = parser.parse_args(argv)
    if not 1 <= args.steps < args.context or args.repeats < 1:
        parser.error("--steps must be at least 1 and below --context, and --repeats at least 1")
    check_counts(parser, args, "layers")

    on_gpu = jax.default_backend() == "gpu"
    limits = timing.jax_limits("trace" if on_gpu else "wall", smoke=not on_gpu)
    copy, matmul = limits.copy_gb_per_s * 1e9, limits.matmul_tflop_per_s * 1e12
    print(f"copy {copy / 1e12:.2f} TB/s, bfloat16 matmul {matmul / 1e12:.0f} TFLOP/s")
    rows = []
    for preset, dtype in itertools.product(args.preset, args.dtype):
        config = llama3.PRESETS[preset]
        if args.layers:
            config = dataclasses.replace(config, layers=args.layers)
        params = random_params(config, dtype == "int8")
        for backend in args.backend:
            cache = init_cache(config, 1, args.context, jnp.bfloat16)
            read = read_bytes(params, cache)
            with jaxllm.use_backend(backend):
                whole, cache = time_prefill(params, cache, config, args.repeats)
                token = time_decoding(params, cache, config, args.steps, args.repeats)
            for phase, seconds, tokens, limit in (
                ("prefill", whole, args.context, prefill_flops(config, args.context) / matmul),
                ("decode", token, 1, read / copy),
            ):
                rows.append(
                    (
                        *(preset, dtype, f"{1e3 * seconds:.3f}", f"{tokens / seconds:.0f}"),
                        *(f"{1e3 * limit:.3f}", f"{limit / seconds:.3f}", f"{phase} {backend}"),
                    )
                )
        del params
    print(format_table(HEADER, rows))


if __name__ == "__main__":
    main()
