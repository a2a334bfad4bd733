"""Continues a prompt with a trained model, and prints the tokens as they are generated.

    python examples/generate.py "def main("
    python examples/generate.py --model Llama-3.2-1B --int8 "The capital of France is"

A model is a folder with ``config.json`` and safetensors files: a Hugging Face checkpoint, or a
``runs/NAME/model`` of the pretraining examples. The default is the newest of the latter. The
tokenizer is the folder's ``tokenizer.json``. Without that file it is bytes or GPT-2's, by the size
of the vocabulary. Generation stops at the end tokens in the configs of model and tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxllm
from jaxllm import training
from jaxllm.convert import huggingface
from jaxllm.core.backend import BACKENDS, Backend, resolve
from jaxllm.data import tokenizer
from jaxllm.data.tokenizer import BYTES, Tokenizer
from jaxllm.inference.generate import stream
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import gpt2, llama3

SMOKE_CONFIG = gpt2.GPT2Config(vocab_size=257, max_seq_len=64, layers=2, heads=2, width=64)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompt", nargs="?", default="def ", help="default: %(default)r")
    parser.add_argument(
        "--model", type=Path, help="a checkpoint folder; default: the newest in runs"
    )
    parser.add_argument(
        "--tokenizer", help="bytes, gpt2, a tokenizer.json, or llm.c's .bin; default: MODEL's"
    )
    parser.add_argument(
        "--end-of-text",
        metavar="NAME",
        help="the token that ends a text; default: by the configs",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=200,
        metavar="N",
        help="fewer where the model's longest sequence ends; default: %(default)s",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 for the likeliest token")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="0 for all tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="the likeliest that sum to P")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: by the device")
    parser.add_argument("--int8", action="store_true", help="weights in int8")
    parser.add_argument("--group-size", type=int, default=64, help="int8 weights to a scale")
    parser.add_argument("--int8-cache", action="store_true", help="keys and values in int8")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best on this machine")
    parser.add_argument("--smoke", action="store_true", help="a random model, a few tokens")
    options = parser.parse_args(argv)
    check_backend(options.backend, parser)
    return options


def check_backend(name: Backend | None, parser: argparse.ArgumentParser) -> None:
    """Exits with a message if no backend is named, and that of JAXLLM_BACKEND is unknown."""
    try:
        resolve(name)
    except ValueError as error:
        parser.error(str(error))


@contextlib.contextmanager
def on_backend(name: Backend | None) -> Iterator[None]:
    """Runs all ops on a backend, if one is named; exits with its reason if it cannot serve one."""
    try:
        with jaxllm.use_backend(name) if name else contextlib.nullcontext():
            yield
    except jaxllm.BackendError as error:
        raise SystemExit(f"\n{error}") from error


def newest_model() -> Path:
    """The newest model of the pretraining examples."""
    configs = sorted(Path("runs").glob("*/model/config.json"), key=lambda f: f.stat().st_mtime)
    if not configs:
        raise SystemExit(
            "there is no model in runs; train one with `make demo`, or pass a folder as --model"
        )
    return configs[-1].parent


def tokenizer_of(folder: Path, vocab_size: int, end_of_text: str | None = None) -> Tokenizer:
    """The folder's tokenizer, or bytes or GPT-2's by the size of the vocabulary."""
    if (folder / "tokenizer.json").exists():
        return tokenizer.from_file(folder, end_of_text=end_of_text)
    if vocab_size <= BYTES.vocab_size:
        return tokenizer.load("bytes", end_of_text=end_of_text)
    if vocab_size in (gpt2.GPT2Config().vocab_size, gpt2.GPT2Config().padded_vocab_size):
        return tokenizer.load("gpt2", end_of_text=end_of_text)
    raise ValueError(
        f"{folder} has no tokenizer.json, and {vocab_size} tokens are neither bytes nor GPT-2's; "
        "pass its tokenizer as --tokenizer"
    )


def load_model(folder: Path | None, dtype: str) -> tuple[Any, Any, Path]:
    """Parameters, config and folder of a model; the newest in runs if ``folder`` is None."""
    folder = folder or newest_model()
    try:
        params, config = huggingface.load(folder, dtype=dtype)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    print(f"model: {folder}", flush=True)
    return params, config, folder


def load(options: argparse.Namespace) -> tuple[Any, Any, Tokenizer, tuple[int, ...]]:
    """Parameters, config, tokenizer and stop tokens."""
    dtype = options.dtype or training.default_compute_dtype()
    if options.smoke:
        params = gpt2.init(jax.random.key(options.seed), SMOKE_CONFIG)
        return training.cast(params, dtype), SMOKE_CONFIG, BYTES, BYTES.stop_tokens
    params, config, folder = load_model(options.model, dtype)
    if options.tokenizer:
        encoding = tokenizer.load(options.tokenizer, end_of_text=options.end_of_text)
    else:
        encoding = tokenizer_of(folder, config.vocab_size, options.end_of_text)
    stops = encoding.stop_tokens
    if options.end_of_text is None:
        stops += config.special_tokens.eos
    return params, config, encoding, stops


def quantize(params: Any, group_size: int) -> Any:
    """Quantizes the weights to int8."""
    try:
        return quantize_params(params, group_size=group_size)
    except ValueError as error:
        raise SystemExit(f"{error}; see --group-size") from error


def pieces(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Decodes tokens as they arrive; an incomplete character waits for its other bytes."""
    ids: list[int] = []
    # ids[start:shown] are the last piece: the text of a token may depend on the token before it.
    start = shown = 0

    def rest() -> str:
        return tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:shown])) :]

    for token in tokens:
        ids.append(token)
        text = rest()
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text
            start, shown = shown, len(ids)
    if text := rest():
        yield text


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the prompt, its continuation and the speed."""
    options = parse(argv)
    if options.max_new_tokens < 1:
        raise SystemExit(f"--max-new-tokens is {options.max_new_tokens}, must be above 0")
    if not -(2**63) <= options.seed < 2**63:
        raise SystemExit(f"--seed is {options.seed}, must be from -2**63 to 2**63 - 1")
    try:
        params, config, tokenizer, stops = load(options)
        ids = tokenizer.encode(options.prompt).tolist()
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if options.int8:
        params = quantize(params, options.group_size)
    if tokenizer.begin_of_text is not None:
        ids = [tokenizer.begin_of_text, *ids]
    remaining = config.max_seq_len - len(ids)
    count = min(8 if options.smoke else options.max_new_tokens, remaining)
    if not ids or count < 1:
        raise SystemExit(
            f"the prompt has {len(ids)} tokens; it must have from 1 to {config.max_seq_len - 1}"
        )
    try:
        tokens = stream(
            gpt2 if isinstance(config, gpt2.GPT2Config) else llama3,
            params,
            ids,
            config=config,
            max_new_tokens=count,
            temperature=options.temperature,
            top_k=options.top_k or None,
            top_p=options.top_p,
            stop_tokens=stops,
            key=jax.random.key(options.seed),
            cache_dtype="int8" if options.int8_cache else None,
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    times: list[float] = []

    def timed() -> Iterator[int]:
        for token in tokens:
            times.append(time.perf_counter())
            if token not in stops:
                yield token

    print(options.prompt, end="", flush=True)
    with on_backend(options.backend):
        for text in pieces(timed(), tokenizer):
            print(text, end="", flush=True)
    # The first two tokens include compilation: of the prefill, and of the decode step.
    steps, seconds = len(times) - 2, times[-1] - times[min(1, len(times) - 1)]
    speed = f", {steps / seconds:,.1f} tokens/s" if steps > 0 else ""
    print(f"\n{len(times)} tokens{speed}")


if __name__ == "__main__":
    main()
