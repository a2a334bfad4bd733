"""Computes loss and perplexity of a trained model on held-out text, in float and in int8.

    python examples/evaluate.py
    python examples/evaluate.py --model Llama-3.2-1B --data shards

A model is a folder, as for ``examples/generate.py``. The default is the newest model of the
pretraining examples. The text is the validation split of token shards, by default of the corpus
that those examples train on.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from generate import SMOKE_CONFIG, check_backend, load_model, on_backend, quantize

from jaxllm import data, training
from jaxllm.core.backend import BACKENDS
from jaxllm.data.tokenizer import BYTES
from jaxllm.models import gpt2, llama3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a checkpoint folder; default: the newest in runs"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder of *val*.bin, in the model's tokens; default: data/stdlib",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, help="default: the model's longest, up to 1024")
    parser.add_argument("--batches", type=int, default=16, metavar="N", help="0 for all the text")
    parser.add_argument("--group-size", type=int, default=64, help="int8 weights to a scale")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: by the device")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best on this machine")
    parser.add_argument("--smoke", action="store_true", help="a random model, a little text")
    options = parser.parse_args(argv)
    check_backend(options.backend, parser)
    for name, least in (("batch_size", 1), ("seq_len", 1), ("batches", 0), ("group_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}, must be at least {least}")
    return options


def load(options: argparse.Namespace) -> tuple[Any, Any, data.Dataset]:
    """Parameters, config and text."""
    if not options.smoke:
        params, config, _ = load_model(options.model, options.dtype)
        return params, config, open_text(options.data, config.vocab_size)
    params = gpt2.init(jax.random.key(0), SMOKE_CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        source = [data.standard_library() / "json"]
        data.build(Path(folder, "data"), source, extensions=(".py",))
        # Memory-mapped files stay valid after they are deleted.
        return params, SMOKE_CONFIG, open_text(Path(folder, "data"), SMOKE_CONFIG.vocab_size)


def open_text(folder: Path | None, vocab_size: int) -> data.Dataset:
    """Opens the validation split, and checks that its tokens are in the vocabulary."""
    if folder is None and vocab_size != BYTES.vocab_size:
        raise SystemExit(
            f"the model has {vocab_size} tokens, and the default corpus is bytes; pass shards with "
            "the model's tokens as --data"
        )
    folder = data.ensure_standard_library() if folder is None else folder
    try:
        text = data.open_split(folder, "val")
        data.check_vocabulary(text, vocab_size)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    return text


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Prints loss and perplexity in float and in int8; returns the losses by dtype."""
    options = parse(argv)
    options.dtype = options.dtype or training.default_compute_dtype()
    params, config, text = load(options)
    model: Any = gpt2 if isinstance(config, gpt2.GPT2Config) else llama3
    seq_len = options.seq_len or min(config.max_seq_len, 1024)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        return model.loss(params, tokens, labels, config)

    evaluate = training.make_eval_step(loss, compute_dtype=options.dtype)
    # Before the loss in float, which takes a while.
    jax.eval_shape(lambda params: quantize(params, options.group_size), params)
    losses: dict[str, float] = {}
    with on_backend(options.backend):
        try:
            for dtype in (options.dtype, "int8"):
                if dtype == "int8":
                    params = quantize(params, options.group_size)
                losses[dtype] = training.mean_loss(
                    evaluate,
                    params,
                    text,
                    batch_size=options.batch_size,
                    seq_len=seq_len,
                    batches=options.batches or None,
                )
                perplexity = math.exp(losses[dtype])
                print(f"{dtype}: loss {losses[dtype]:.4f}, perplexity {perplexity:.4f}", flush=True)
        except ValueError as error:
            raise SystemExit(str(error)) from error
    change = math.expm1(losses["int8"] - losses[options.dtype])
    print(f"int8 changes the perplexity by {change:+.3%}")
    return losses


if __name__ == "__main__":
    main()
