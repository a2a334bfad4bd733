"""What the pretraining examples share: the command line, the loop, the log, samples and the curve.

Each example says which model is trained, in which sizes; run those::

    python examples/pretrain_gpt2.py
    python examples/pretrain_llama3.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

import jaxllm
from jaxllm import data, training
from jaxllm.backend import BACKENDS
from jaxllm.convert import huggingface
from jaxllm.generate import generate
from jaxllm.models.blocks import SAVE_PRODUCTS, stack, unstack
from jaxllm.tokenizer import BYTES

try:
    from matplotlib.figure import Figure
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f'{error}; run: pip install "jaxllm[train]"') from error


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a preset trains with where the command line does not say otherwise."""

    steps: int = 2000
    batch_size: int = 16
    seq_len: int = 1024
    accumulate: int = 1
    lr: float = 6e-4
    warmup: int = 100


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one kind, and how each is trained.

    Attributes:
        name: What the model is called.
        model: Its module, with ``init``, ``loss``, ``forward``, ``num_params`` and
            ``flops_per_token``.
        presets: Configs by name; ``"tiny"``, for a CPU, and ``"d6"``, for a GPU, are the defaults.
        recipes: Of those presets that have one.
    """

    name: str
    model: ModuleType
    presets: Mapping[str, Any]
    recipes: Mapping[str, Recipe]


SMOKE = Recipe(steps=8, batch_size=2, seq_len=32, accumulate=2, lr=4e-3, warmup=2)
VAL_BATCHES = 8
PROMPT = "def "
# What is computed again in the backward pass.
REMAT = {"nothing": False, "activations": SAVE_PRODUCTS, "blocks": True}


def parse(
    argv: Sequence[str] | None, family: Family, description: str | None
) -> argparse.Namespace:
    """Reads the command line; the recipe and the machine fill in what it leaves out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=family.presets, help="default: d6 on a GPU, tiny elsewhere")
    add("--data", type=Path, help="a folder of *train*.bin and *val*.bin; default: data/stdlib")
    add("--vocab-size", type=int, help="of the tokens in DATA; default: 257, for bytes")
    add("--steps", type=int, help="this and the next five: default by preset, see RECIPES")
    add("--batch-size", type=int, help="sequences in a microbatch")
    add("--seq-len", type=int)
    add("--accumulate", type=int, help="microbatches in a step")
    add("--lr", type=float, help="the peak learning rate")
    add("--warmup", type=int, help="steps")
    add("--seed", type=int, default=0)
    add("--backend", choices=BACKENDS, help="of every op; default: as JAXLLM_BACKEND says, or auto")
    add("--dtype", choices=("float32", "bfloat16"), help="to compute in")
    add(
        "--remat",
        choices=REMAT,
        default="nothing",
        help="what the backward pass computes again: less memory, more time",
    )
    add(
        "--unroll",
        action=argparse.BooleanOptionalAction,
        help="keep the layers apart: a faster step, a longer compilation; default: on a GPU",
    )
    add("--out", type=Path, help="default: runs/MODEL_PRESET")
    add("--val-every", type=int, default=100, metavar="STEPS", help="0 for never")
    add("--sample-every", type=int, default=200, metavar="STEPS", help="0 for at the end only")
    add("--smoke", action="store_true", help="a few seconds, to see that it works")
    options = parser.parse_args(argv)

    options.family = family
    on_gpu = jax.default_backend() == "gpu"
    if options.preset is None:
        options.preset = "d6" if on_gpu and not options.smoke else "tiny"
    recipe = SMOKE if options.smoke else family.recipes.get(options.preset, Recipe())
    defaults = dataclasses.asdict(recipe)
    defaults["dtype"] = training.default_compute_dtype()
    defaults["unroll"] = on_gpu
    defaults["out"] = Path("runs", f"{stem(family)}_{options.preset}")
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("steps", "batch_size", "seq_len", "accumulate"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, must be above 0")
    options.warmup = min(options.warmup, options.steps)
    options.tokenizer = BYTES if options.vocab_size in (None, BYTES.vocab_size) else None
    options.vocab_size = options.vocab_size or BYTES.vocab_size
    try:
        options.train, options.val = open_data(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options


def open_data(options: argparse.Namespace) -> tuple[data.Dataset, data.Dataset | None]:
    """Opens the two splits, building the default corpus if it is not there."""
    folder = options.data
    if folder is None and options.smoke:  # one package, for speed
        folder = options.out / "data"
        if not folder.exists():
            data.build(folder, [data.standard_library() / "json"], extensions=(".py",))
    elif folder is None:
        folder = data.ensure_standard_library()
    train = data.open_dataset(folder / "*train*.bin")
    # Draws one batch, so that a corpus that is too short is an error here.
    make_batch(train, options, 0)
    val = data.open_dataset(folder / "*val*.bin") if any(folder.glob("*val*.bin")) else None
    if val is None or data.num_windows(val, options.seq_len) == 0:
        print(f"{folder}: nothing to validate on")
        return train, None
    return train, val


def make_batch(
    dataset: data.Dataset, options: argparse.Namespace, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens and labels of a step, of shape (accumulate, B, T)."""
    shape = (options.accumulate, options.batch_size, options.seq_len)
    tokens, labels = data.batch(
        dataset, shape[0] * shape[1], options.seq_len, seed=options.seed, step=step
    )
    if (largest := max(tokens.max(), labels.max())) >= options.vocab_size:
        raise ValueError(
            f"{dataset.name} has token {largest}, but the vocabulary has {options.vocab_size}; "
            "give --vocab-size (50257 for GPT-2's tokens)"
        )
    return tokens.reshape(shape), labels.reshape(shape)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed; a second press acts as usual."""
    pressed = False
    previous = signal.getsignal(signal.SIGINT)

    def note(*_) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, previous)
        tqdm.write("stopping after this step; Ctrl-C again quits at once", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def stem(family: Family) -> str:
    """The name of a family's module: ``"gpt2"``."""
    return family.model.__name__.rpartition(".")[-1]


def make_config(options: argparse.Namespace) -> Any:
    """The preset, for the vocabulary and the sequence length of this run."""
    preset = options.family.presets[options.preset]
    config = dataclasses.replace(preset, vocab_size=options.vocab_size)
    if options.seq_len > config.max_seq_len or options.preset == "tiny":
        config = dataclasses.replace(config, max_seq_len=options.seq_len)
    return config


def train(options: argparse.Namespace) -> list[dict]:
    """Runs the training loop and saves the model; returns what it logged, one record a step."""
    family, config = options.family, make_config(options)
    model = family.model
    tokens_per_step = options.accumulate * options.batch_size * options.seq_len
    flops_per_token = model.flops_per_token(config, options.seq_len)
    device = jax.devices()[0].device_kind
    print(
        f"{family.name} {options.preset}: {model.num_params(config):,} parameters on {device} "
        f"in {options.dtype}, {tokens_per_step:,} tokens a step"
    )

    def loss_fn(params, tokens, labels):
        return model.loss(params, tokens, labels, config, remat=REMAT[options.remat])

    schedule = training.warmup_cosine(options.lr, options.steps, warmup=options.warmup)
    optimizer = training.adamw(schedule)
    params = model.init(jax.random.key(options.seed), config)
    state = training.init_state(
        unstack(params) if options.unroll else params,
        optimizer,
        copy_dtype=None if options.dtype == "float32" else options.dtype,
    )
    evaluate = training.make_eval_step(loss_fn, compute_dtype=options.dtype)
    train_step = training.make_train_step(
        loss_fn, optimizer, learning_rate=schedule, compute_dtype=options.dtype
    )
    # Compiled before the clock starts, so that every step counts alike.
    print("compiling ...", end=" ", flush=True)
    began = time.perf_counter()
    train_step = train_step.lower(state, *make_batch(options.train, options, 0)).compile()
    print(f"{time.perf_counter() - began:.1f} s", flush=True)

    records: list[dict] = []
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        (options.out / "log.jsonl").open("w", buffering=1) as log,
        ThreadPoolExecutor(1) as pool,
        tqdm(total=options.steps, unit="step", dynamic_ncols=True) as bar,
        interruptible() as interrupted,
    ):
        upcoming = pool.submit(make_batch, options.train, options, 0)
        pending = None  # the step, and its metrics, that may still be running
        began = time.perf_counter()

        def measure(step: int, metrics: dict[str, jax.Array]) -> dict:
            """Waits until a step is done; what there is to log of it."""
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            elapsed = time.perf_counter() - began
            speed = tokens_per_step * step / elapsed
            record = {"step": step, **values, "tokens_per_second": speed, "elapsed": elapsed}
            mfu = training.model_flops_utilization(flops_per_token * speed, 1, device)
            return record if mfu is None else {**record, "mfu": mfu}

        def write(record: dict) -> None:
            records.append(record)
            log.write(json.dumps(record) + "\n")
            shown = {"loss": f"{record['loss']:.3f}"}
            shown["tokens/s"] = f"{record['tokens_per_second']:,.0f}"
            if "mfu" in record:
                shown["MFU"] = f"{record['mfu']:.1%}"
            bar.set_postfix(shown, refresh=False)
            bar.update()

        for step in range(1, options.steps + 1):
            tokens, labels = upcoming.result()
            upcoming = pool.submit(make_batch, options.train, options, step)
            state, metrics = train_step(state, tokens, labels)
            if pending:  # the step before, while this one runs
                write(measure(*pending))
            pending = step, metrics

            last = step == options.steps
            validating = options.val and (last or is_due(step, options.val_every))
            sampling = last or is_due(step, options.sample_every)
            if not (validating or sampling or interrupted()):
                continue
            record, pending = measure(*pending), None
            paused = time.perf_counter()
            if validating and not interrupted():
                record["val_loss"] = validate(evaluate, state.params, options)
                tqdm.write(f"step {step}: validation loss {record['val_loss']:.4f}")
            write(record)
            if sampling and not interrupted():
                text = sample(state.params, config, options, step)
                tqdm.write(f"--- a sample after step {step}:\n{text}\n---")
            began += time.perf_counter() - paused
            if interrupted():
                break
    save(options.out / "model", state.params, config)
    return records


def save(folder: Path, params: dict, config: Any) -> None:
    """Writes the model for examples/generate.py and for transformers, over that of a run before."""
    if folder.exists():
        shutil.rmtree(folder)
    huggingface.save(folder, stack(params), config)


def validate(evaluate: Callable, params: dict, options: argparse.Namespace) -> float:
    """The mean loss over the same few batches each time."""
    return training.mean_loss(
        evaluate,
        params,
        options.val,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        batches=VAL_BATCHES,
    )


def sample(params: dict, config: Any, options: argparse.Namespace, step: int) -> str:
    """A text that the model writes; token ids where there is no tokenizer for its vocabulary."""
    tokenizer = options.tokenizer
    # The last id of GPT-2 is its end-of-text, after which a new document begins.
    prompt = tokenizer.encode(PROMPT) if tokenizer else np.array([config.vocab_size - 1])
    tokens = generate(
        options.family.model.forward,
        training.cast(params, options.dtype),
        prompt,
        config=config,
        max_new_tokens=16 if options.smoke else 200,
        temperature=0.8,
        top_k=40,
        key=jax.random.fold_in(jax.random.key(options.seed), step),
    )
    ids = np.asarray(tokens)
    return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done now; 0 is never."""
    return every > 0 and step % every == 0


def draw_curve(path: Path, records: list[dict], title: str) -> None:
    """Draws the training and validation losses over the steps."""
    axes = (figure := Figure(figsize=(8, 5))).subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], lw=1, label="training")
    held_out = [r for r in records if "val_loss" in r]
    if held_out:
        axes.plot(
            [r["step"] for r in held_out],
            [r["val_loss"] for r in held_out],
            "o-",
            label="validation",
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(argv: Sequence[str] | None, family: Family, description: str | None) -> None:
    """Trains, and leaves the log and the loss curve in the output folder.

    Args:
        argv: The arguments; None for the process's own.
        family: What to train.
        description: Begins the help text.
    """
    options = parse(argv, family, description)
    try:
        with jaxllm.use_backend(options.backend) if options.backend else contextlib.nullcontext():
            records = train(options)
    except jaxllm.BackendError as error:
        raise SystemExit(f"\n{error}") from error
    curve = options.out / "loss.png"
    draw_curve(curve, records, f"{family.name} {options.preset}")
    last = records[-1]
    validated = f" (validation {last['val_loss']:.3f})" if "val_loss" in last else ""
    print(
        f"{last['step']} steps in {last['elapsed']:.1f} s, {last['tokens_per_second']:,.0f} "
        f"tokens/s: loss {records[0]['loss']:.3f} -> {last['loss']:.3f}{validated}"
    )
    print(f"log: {options.out / 'log.jsonl'}\nmodel: {options.out / 'model'}\ncurve: {curve}")
