"""The training loop that the pretraining examples share, with logs, checkpoints and samples.

The examples define the models and their sizes. Run them::

    python examples/pretrain_gpt2.py
    python examples/pretrain_llama3.py
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pretraining_options import (
    REMAT,
    Family,
    Recipe,
    file_digests,
    identity,
    later_identity,
    make_batch,
    parse,
    record_of,
    rows_sharding,
    settings,
)

import jaxllm
from jaxllm import training
from jaxllm.convert import huggingface, llmc
from jaxllm.core.gathers import GatherWarning
from jaxllm.inference.generate import generate
from jaxllm.models.common import stack, unstack
from jaxllm.training import checkpoint, evaluation, parallel, runlog

try:
    import matplotlib  # noqa: F401  needed for the loss curve at the end
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f'{error}; run: pip install "jaxllm[train]"') from error

__all__ = ["Family", "Recipe", "main"]


def train(options: argparse.Namespace) -> None:
    """Runs the training loop and saves the model."""
    model, config = options.family.model, options.model_config
    if jax.default_backend() == "gpu":
        training.keep_compiled(options.out.parent / "compiled")
    tokens_per_step = options.accumulate * options.batch_size * options.seq_len
    print(
        f"{options.family.name} {options.preset}: {model.num_params(config):,} parameters on "
        f"{machine(options)} in {options.dtype}{with_float8(options)}, {tokens_per_step:,} tokens "
        "a step"
    )

    def loss_fn(params, tokens, labels, segment_ids=None, positions=None):
        how = {"remat": REMAT[options.remat], "precision": options.precision}
        how |= {"segment_ids": segment_ids, "positions": positions}
        return model.loss(params, tokens, labels, config, **how)

    optimizer = training.adamw(
        options.learning_rate,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm or None,
    )
    evaluate = training.make_eval_step(loss_fn, compute_dtype=options.dtype)
    state, mesh = initial_state(options, optimizer), options.mesh
    train_step = training.make_train_step(
        loss_fn,
        optimizer,
        learning_rate=options.learning_rate,
        compute_dtype=options.dtype,
        microbatch_weights=options.microbatch_weights,
        max_loss_z=options.max_loss_z,
        max_norm_z=options.max_norm_z,
        float8_counts=options.float8_counts,
        max_underflow=options.max_underflow,
        shardings=None if mesh is None else parallel.state_shardings(mesh, state),
        overlap=options.family.overlap,
    )
    flops = flops_share(options)

    with (
        checkpoints(options) as folder,
        ThreadPoolExecutor(1) as pool,
        interruptible() as interrupted,
    ):
        state = resume(folder, state, options)
        first = int(state.step)
        # Compile before the timer starts, so the first step is not slower than the others.
        print("compiling ...", end=" ", flush=True)
        began = time.perf_counter()
        train_step = train_step.lower(state, *make_batch(options.train, options, 0)).compile()
        print(f"{time.perf_counter() - began:.1f} s", flush=True)

        bar = tqdm(
            total=options.steps,
            initial=first,
            unit="step",
            dynamic_ncols=True,
            disable=jax.process_index() > 0,
        )
        with open_log(options, first) as write, bar:
            upcoming = pool.submit(make_batch, options.train, options, first)
            pending = None  # (step, metrics) of a step that may still be running
            began = time.perf_counter()

            def measure(step: int, metrics: dict[str, jax.Array]) -> dict:
                """Waits until a step is done; returns its record for the log."""
                values = {name: float(value) for name, value in jax.device_get(metrics).items()}
                if values.pop("halted_at"):
                    rate = values["learning_rate"]
                    if not math.isfinite(rate):
                        raise SystemExit(f"\nstep {step}: learning rate {rate} is not finite")
                    if math.isfinite(values["loss"] + values["grad_norm"]):
                        count = values["float8_overflow"]
                        raise SystemExit(f"\nstep {step}: {count:.0f} float8 operands overflow")
                    batch = make_batch(options.train, options, step - 1)
                    why = training.explain_halt(
                        loss_fn, state.params, *batch, compute_dtype=options.dtype
                    )
                    raise SystemExit(f"\nstep {step}: loss {values['loss']} is not finite\n{why}")
                elapsed = time.perf_counter() - began
                speed = tokens_per_step * (step - first) / elapsed
                known = {name: value for name, value in values.items() if not math.isnan(value)}
                record = {"step": step, **known, "tokens_per_second": speed, "elapsed": elapsed}
                return record if flops is None else {**record, "mfu": flops * speed}

            def report(record: dict) -> None:
                write(record)
                if record["skipped"]:
                    tqdm.write(f"step {record['step']}: skipped; {why_skipped(record)}")
                shown = {"loss": f"{record['loss']:.3f}"}
                shown["tokens/s"] = f"{record['tokens_per_second']:,.0f}"
                if "mfu" in record:
                    shown["MFU"] = f"{record['mfu']:.1%}"
                bar.set_postfix(shown, refresh=False)
                bar.update()

            for step in range(first + 1, options.steps + 1):
                try:
                    batch = upcoming.result()
                except ValueError as error:  # such as a token beyond the vocabulary
                    if pending:
                        report(measure(*pending))
                    if step - 1 > first:
                        save_early(folder, step - 1, state, options)
                    raise SystemExit(f"\nstep {step}: {error}") from error
                upcoming = pool.submit(make_batch, options.train, options, step)
                state, metrics = train_step(state, *batch)
                if pending:  # report the previous step while this one runs
                    report(measure(*pending))
                pending = step, metrics

                due = due_after(step, options)
                if not (due or interrupted()):
                    continue
                record, pending = measure(*pending), None
                # On several devices each may have the copy, but a shard of the masters.
                weights = state.params if state.copy is None else state.copy
                paused = time.perf_counter()
                if "validation" in due and not interrupted():
                    record["val_loss"] = validate(evaluate, weights, options)
                    tqdm.write(f"step {step}: validation loss {record['val_loss']:.4f}")
                if "hellaswag" in due and not interrupted():
                    record["hellaswag"] = hellaswag_accuracy(weights, options)
                    tqdm.write(f"step {step}: HellaSwag {record['hellaswag']:.4f}")
                report(record)
                if folder and ("checkpoint" in due or interrupted()):
                    checkpoint.save(folder, step, state, record_of(options))
                if "sample" in due and not interrupted():
                    text = sample(weights, options, step)
                    tqdm.write(f"--- sample after step {step}:\n{text}\n---")
                began += time.perf_counter() - paused
                if interrupted():
                    break
    save(state, options)


def why_skipped(record: dict) -> str:
    """What the anomaly detector found in a step."""
    if "float8_underflow" not in record:
        return "its loss or norm is an outlier"
    lost = record["float8_underflow"], record["float8_gradient_underflow"]
    return (
        "its loss or norm is an outlier, or float8 lost too much: {:.2%} of inputs and weights, "
        "{:.2%} of gradients".format(*lost)
    )


def machine(options: argparse.Namespace) -> str:
    """The devices of the run: ``"8 NVIDIA H100 80GB HBM3 (data=2, fsdp=4; 2 processes)"``."""
    kind = jax.devices()[0].device_kind
    if options.mesh is None:
        return kind
    sizes = options.mesh.shape
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
    count = jax.process_count()
    processes = f"; {count} processes" if count > 1 else ""
    return f"{options.mesh.size} {kind} ({axes}{processes})"


def with_float8(options: argparse.Namespace) -> str:
    """The float8 recipe, for the first line of the output."""
    chosen = options.precision
    if chosen is not None and not isinstance(chosen, str):
        chosen = ", ".join(f"{name}={recipe}" for name, recipe in chosen.items())
    return "" if chosen is None else f" with float8 GEMMs ({chosen})"


@contextlib.contextmanager
def open_log(options: argparse.Namespace, after: int) -> Iterator[Callable[[dict], None]]:
    """Opens the log in process 0; in other processes, yields a function that writes nothing."""
    if jax.process_index():
        yield lambda record: None
        return
    with runlog.open_log(options.out, after=after, tensorboard=options.tensorboard) as write:
        yield write


def initial_state(options: argparse.Namespace, optimizer: Any) -> training.TrainState:
    """The state before the first step, from the loaded model or a random initialization."""
    params, options.params = options.params, None
    copy_dtype = None if options.dtype == "float32" else options.dtype
    kept: dict[str, Any] = {"copy_dtype": copy_dtype, "detect_anomalies": True}

    def init() -> dict:
        return options.family.model.init(jax.random.key(options.seed), options.model_config)

    if options.mesh is not None:
        given, unroll = init if params is None else params, options.unroll
        return parallel.init_state(options.mesh, given, optimizer, unroll=unroll, **kept)
    params = init() if params is None else params
    params = unstack(params) if options.unroll else params
    return training.init_state(params, optimizer, **kept)


@contextlib.contextmanager
def checkpoints(options: argparse.Namespace) -> Iterator[Any]:
    """Opens the folder of the run's checkpoints; yields None if the run has no checkpoints."""
    path = options.out / "checkpoints"
    if not (options.checkpoint_every or options.resume or path.exists()):
        yield None
        return
    with checkpoint.open_folder(path, keep=options.keep, keep_every=options.keep_every) as folder:
        yield folder


def resume(folder: Any, state: training.TrainState, options: argparse.Namespace):
    """The state of the newest checkpoint with ``--resume``; ``state`` if there is none."""
    if folder is None or folder.latest_step() is None:
        return state
    if not options.resume:
        raise SystemExit(
            f"{options.out} has checkpoints of a run: pass --resume to continue from step "
            f"{folder.latest_step()}, or another --out"
        )
    if folder.latest_step() > options.steps:
        raise SystemExit(
            f"--steps is {options.steps}; the newest checkpoint in {options.out} is of step "
            f"{folder.latest_step()}"
        )
    wanted = identity(options)
    try:
        found = later_identity(options) | checkpoint.read_record(folder)
        if differing := [name for name in wanted if found.get(name) != wanted[name]]:
            name = differing[0]
            raise SystemExit(
                f"the checkpoints in {options.out} are of a run with {name} {found.get(name)}; "
                f"this one has {wanted[name]}{other_files(name, found, options)}"
            )
        state = checkpoint.restore(folder, state)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(f"resuming from step {int(state.step)}")
    for name, value in settings(options).items():
        if name in found and found[name] != value:
            print(f"with {name} {value}, which was {found[name]}")
    return state


def other_files(name: str, found: dict, options: argparse.Namespace) -> str:
    """The end of a message that a resumed run differs in ``name`` from its record ``found``.

    Names the first file of the training data that differs; the records of older runs have no files.
    """
    if not name.startswith("train_"):
        return ""
    before, now = found.get("train_files", {}), file_digests(options.train)
    files = [file for file in {**before, **now} if before.get(file) != now.get(file)]
    if not before or not files:
        return f": {options.train.name} has other tokens"
    file, count = files[0], len(files)
    change = "is new" if file not in before else "differs" if file in now else "is missing"
    return f": {count} of the files {options.train.name} changed; {file} {change}"


def flops_share(options: argparse.Namespace) -> float | None:
    """The model's flops per token divided by the peak or measured flop/s; None if unknown."""
    kind = jax.devices()[0].device_kind
    if options.mfu == "matmul":
        full = training.measured_matmul_flops(options.dtype)
        print(f"MFU is relative to {full / 1e12:.1f} TFLOP/s, the rate of a large matmul")
    elif (full := training.peak_flops(kind)) is None:
        return None
    per_token = options.family.model.flops_per_token(options.model_config, options.seq_len)
    return per_token / full


def due_after(step: int, options: argparse.Namespace) -> set[str]:
    """The evaluations, samples and checkpoints that are due after a step."""
    last = step == options.steps
    every = {"sample": options.sample_every}
    if options.val:
        every["validation"] = options.val_every
    if options.questions:
        every["hellaswag"] = options.hellaswag_every
    if options.checkpoint_every:
        every["checkpoint"] = options.checkpoint_every
    return {name for name, steps in every.items() if last or (steps > 0 and step % steps == 0)}


def validate(evaluate: Callable, params: dict, options: argparse.Namespace) -> float:
    """The mean loss over a fixed set of validation batches."""
    return training.mean_loss(
        evaluate,
        params,
        options.val,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        batches=options.val_batches,
        sharding=rows_sharding(options),
        **options.documents,
    )


def hellaswag_accuracy(params: dict, options: argparse.Namespace) -> float:
    """The share of HellaSwag's questions that the model answers correctly."""
    return evaluation.accuracy(
        options.family.model.forward,
        training.cast(params, options.dtype),
        options.questions,
        config=options.model_config,
        batch_size=options.batch_size,
        sharding=rows_sharding(options),
    )


def sample(params: dict, options: argparse.Namespace, step: int) -> str:
    """A text sampled from the model; token ids if there is no tokenizer."""
    tokenizer, config = options.tokenizer, options.model_config
    with warnings.catch_warnings():
        # One sequence cannot be sharded, so each device gathers the parameters and computes it.
        warnings.simplefilter("ignore", GatherWarning)
        tokens = generate(
            options.family.model.forward,
            training.cast(params, options.dtype),
            options.prompt_tokens,
            config=config,
            max_new_tokens=16 if options.smoke else 200,
            temperature=0.8,
            top_k=40,
            key=jax.random.fold_in(jax.random.key(options.seed), step),
        )
    ids = np.asarray(tokens)
    return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))


def save(state: training.TrainState, options: argparse.Namespace) -> None:
    """Writes the model for examples/generate.py and transformers; overwrites an earlier model."""
    config, params = options.model_config, state.params
    if options.mesh is not None:
        params = parallel.to_host(params)
    if jax.process_index():
        return
    huggingface.save(
        options.out / "model",
        params,
        config,
        tokenizer_json=tokenizer_json(options),
        special_tokens=special_tokens(options),
        overwrite=True,
    )
    if options.save_llmc:
        llmc.save_gpt2(options.out / "model.bin", stack(params), config)


def save_early(
    folder: Any, step: int, state: training.TrainState, options: argparse.Namespace
) -> None:
    """Writes the checkpoint and the model of a run that ends before its last step.

    Not with several processes: the others have not ended. Their checkpoints remain.
    """
    if jax.process_count() > 1:
        return
    if folder and step not in checkpoint.steps(folder):
        checkpoint.save(folder, step, state, record_of(options))
        tqdm.write(f"checkpoint after step {step}: {options.out / 'checkpoints'}")
    save(state, options)
    tqdm.write(f"model after step {step}: {options.out / 'model'}")


def special_tokens(options: argparse.Namespace) -> huggingface.SpecialTokens | None:
    """The special ids with ``--end-of-text``; None for those of the loaded model or tokenizer."""
    if options.end_of_text is None:
        return None
    ids = options.model_config.special_tokens
    return ids._replace(eos=options.tokenizer.stop_tokens)


def tokenizer_json(options: argparse.Namespace) -> Path | None:
    """The tokenizer.json to save with the model; None if there is no such file."""
    if options.tokenizer and options.tokenizer.name.endswith(".json"):
        return Path(options.tokenizer.name)
    path = options.init_from and options.init_from / "tokenizer.json"
    return path if path and path.exists() else None


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed. A second press quits at once.

    With several processes, the first press quits at once: the processes would not agree on the last
    step. The checkpoints remain.
    """
    if jax.process_count() > 1:
        yield lambda: False
        return
    pressed = False
    previous = signal.getsignal(signal.SIGINT)

    def handle(*_) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, previous)
        tqdm.write("stopping after this step; Ctrl-C again quits at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def main(argv: Sequence[str] | None, family: Family, description: str | None) -> None:
    """Trains a model, and writes the log and the loss curve to the output folder.

    Args:
        argv: The arguments; None for ``sys.argv``.
        family: The model family to train.
        description: The beginning of the help text.
    """
    options = parse(argv, family, description)
    with contextlib.ExitStack() as stack:
        if options.backend:
            stack.enter_context(jaxllm.use_backend(options.backend))
        if jax.process_index():  # process 0 prints for all
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            train(options)
        except jaxllm.BackendError as error:
            raise SystemExit(f"\n{error}") from error
    if jax.process_index() == 0:
        summarize(options)


def summarize(options: argparse.Namespace) -> None:
    """Writes the loss curve and prints the first and the last loss."""
    records, family = runlog.read_log(options.out / "log.jsonl"), options.family
    curve = options.out / "loss.png"
    runlog.plot_losses(curve, {"": records}, f"{family.name} {options.preset}")
    if not records:
        return
    last = records[-1]
    validated = f" (validation {last['val_loss']:.3f})" if "val_loss" in last else ""
    print(
        f"{last['step']} steps in {last['elapsed']:.1f} s, {last['tokens_per_second']:,.0f} "
        f"tokens/s: loss {records[0]['loss']:.3f} -> {last['loss']:.3f}{validated}"
    )
    print(f"log: {options.out / 'log.jsonl'}\nmodel: {options.out / 'model'}\ncurve: {curve}")
