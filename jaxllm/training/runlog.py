"""The log of a training run: JSON lines, llm.c's text format, and TensorBoard events.

A record is a dict with the ``step``, counted from 1, and finite numbers by name. A log folder has

``log.jsonl``
    one record per line;
``main.log``
    the lines that llm.c's scripts plot: ``s:8 trl:3.2100 lr:0.000600 norm:1.20`` for training,
    ``s:8 tel:3.3000`` for the validation loss, ``s:8 eval:0.2950`` for HellaSwag;
``tensorboard/``
    the same values for TensorBoard, if the package ``tensorboard`` is installed.

``python -m jaxllm.training.runlog`` plots the losses of several runs and prints their differences.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.data.files import plain_number, replacing
from jaxllm.ops.checks import as_bool, as_integer

Record = Mapping[str, Any]


@contextlib.contextmanager
def open_log(
    folder: str | Path, *, after: int = 0, tensorboard: bool = True
) -> Iterator[Callable[[Record], None]]:
    """Opens the log of a run.

    Each record is flushed to the operating system before the function returns. If the process is
    killed, only the last line may be incomplete.

    Args:
        folder: The log folder, created if it does not exist.
        after: Keep the records up to this step and append to them; 0 starts a new log.
        tensorboard: Whether to write TensorBoard events, if the package is installed.

    Yields:
        The function that writes a record. Its numbers may be scalars of NumPy or JAX. It writes
        nothing and raises ValueError if a value is not a number, or if the record has no step or
        one below 0; and TypeError if the step is not an integer.

    Raises:
        TypeError: ``after`` is not an integer, or ``tensorboard`` is not a bool.
        ValueError: ``after`` is below 0.
    """
    folder, after = Path(folder), as_integer("after", after, least=0)
    tensorboard = as_bool("tensorboard", tensorboard)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("log.jsonl", "main.log"):
        _cut(folder / name, after)
    with contextlib.ExitStack() as stack:
        jsonl, text = (
            stack.enter_context((folder / name).open("a", buffering=1))
            for name in ("log.jsonl", "main.log")
        )
        events = None
        if tensorboard:
            kept = read_log(folder / "log.jsonl")
            events = stack.enter_context(_events(folder / "tensorboard", kept))

        def write(record: Record) -> None:
            record = _checked(json.loads(json.dumps(dict(record), default=plain_number)))
            lines = llmc_lines(record)  # before the first write, since it may fail
            jsonl.write(json.dumps({"step": record["step"], **record}) + "\n")
            text.writelines(f"{line}\n" for line in lines)
            if events is not None:
                events(record)

        yield write


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``log.jsonl``. An incomplete line is left out."""
    lines = Path(path).read_text(errors="replace").splitlines()
    return list(filter(None, map(_parsed, lines)))


def llmc_lines(record: Record) -> list[str]:
    """The lines of ``main.log`` for a record, in llm.c's format."""
    step, lines = record["step"], []
    if "val_loss" in record:
        lines.append(f"s:{step} tel:{record['val_loss']:.4f}")
    if "hellaswag" in record:
        lines.append(f"s:{step} eval:{record['hellaswag']:.4f}")
    if "loss" in record:
        line = f"s:{step} trl:{record['loss']:.4f}"
        if "learning_rate" in record:
            line += f" lr:{record['learning_rate']:.6f}"
        if "grad_norm" in record:
            line += f" norm:{record['grad_norm']:.2f}"
        lines.append(line)
    return lines


def plot_losses(path: str | Path, runs: Mapping[str, Sequence[Record]], title: str) -> None:
    """Plots the training and validation losses of runs over the steps.

    Args:
        path: The image to write.
        runs: The records of each run, by the run's name. The name of a single run may be empty.
        title: The title of the plot.

    Raises:
        ImportError: The package ``matplotlib`` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plotting needs the package matplotlib: pip install "jaxllm[train]"'
        ) from error
    axes = (figure := Figure(figsize=(8, 5))).subplots()
    # Different line styles, so that curves that coincide stay visible.
    for (run, records), line in zip(runs.items(), itertools.cycle(("-", "--", ":")), strict=False):
        for name, label, marker in (("loss", "training", ""), ("val_loss", "validation", "o")):
            points = [(r["step"], r[name]) for r in records if name in r]
            if points:
                label = f"{run} {label}".strip()
                axes.plot(*zip(*points, strict=True), marker + line, lw=1, ms=4, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def smoothed(records: Sequence[Record], keep: float) -> dict[int, float]:
    """The bias-corrected moving average of the training loss, by step, with decay ``keep``."""
    total, weight, means = 0.0, 0.0, {}
    for record in records:
        total, weight = keep * total + record["loss"], keep * weight + 1
        means[record["step"]] = total / weight
    return means


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """The record, whose step :func:`_cut` can read, and whose values TensorBoard can."""
    for name, value in record.items():
        if not isinstance(value, int | float):
            raise ValueError(f"record has {name} {value!r}; the log can format numbers alone")
    if "step" not in record:
        raise ValueError(f"record has {', '.join(record) or 'nothing'}; it must have a step")
    step = record["step"]
    if isinstance(step, bool) or not float(step).is_integer():
        raise TypeError(f"record has step {step}; it must be an integer")
    if step < 0:
        raise ValueError(f"record has step {step}; it must be at least 0")
    return record | {"step": int(step)}


def _parsed(line: str) -> dict[str, Any]:
    """The record in a line; an empty dict if the line is not a JSON object."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _cut(path: Path, after: int) -> None:
    """Removes the records after a step; replaces the file atomically."""
    # After a crash of the machine, the end of a file may be any bytes.
    text = path.read_text(errors="replace") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    # A line of log.jsonl or of main.log begins with its step.
    step_of = re.compile(r'(?:s:|\{"step": )(\d+)\b.*\n')
    matches = filter(None, map(step_of.fullmatch, lines))
    with replacing(path) as partial:
        partial.write_text("".join(match[0] for match in matches if int(match[1]) <= after))


@contextlib.contextmanager
def _events(folder: Path, kept: Sequence[Record]) -> Iterator[Callable[[Record], None] | None]:
    """The function that writes a record as TensorBoard events; None without the package.

    Records cannot be removed from an event file, so a new file is written from the kept records.
    """
    try:
        from tensorboard.summary import Writer
    except ImportError:
        yield None
        return
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = Writer(str(folder))

    def write(record: Record) -> None:
        for name, value in record.items():
            if name != "step":
                writer.add_scalar(name, value, record["step"])

    try:
        for record in kept:
            write(record)
        yield write
    finally:
        writer.close()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of ``python -m jaxllm.training.runlog``; a mistake exits with status 2.

    Args:
        argv: The arguments; None for the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.training.runlog",
        description="Plot the losses of runs and print their differences.",
    )
    parser.add_argument("image", metavar="IMAGE", type=Path, help="the PNG to write")
    parser.add_argument(
        "logs", metavar="NAME=LOG", nargs="+", help="the name of a run and its log.jsonl"
    )
    parser.add_argument("--steps", type=int, help="use the first STEPS records (default: all)")
    parser.add_argument("--title", default="", help="the title of the plot (default: none)")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.9,
        help="the decay of the loss's exponential moving average (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if not 0 <= options.keep < 1:
        parser.error(f"--keep is {options.keep}; it must be at least 0 and less than 1")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    runs = {}
    for log in options.logs:
        name, equals, path = log.partition("=")
        if not (name and equals):
            parser.error(f"{log} is not of the form NAME=LOG")
        if name in runs:
            parser.error(f"two runs have the name {name}")
        try:
            records = [record for record in read_log(path) if {"step", "loss"} <= record.keys()]
        except OSError as error:
            parser.error(f"{path}: {error}")
        if not records:
            parser.error(f"{path} has no losses")
        runs[name] = records[: options.steps]
    curves = {name: smoothed(records, options.keep) for name, records in runs.items()}
    (first, expected), *others = curves.items()
    lines = []
    for name, found in others:
        distances = [abs(found[step] - expected[step]) for step in found.keys() & expected.keys()]
        if not distances:
            parser.error(f"{name} and {first} have no step in common")
        lines.append(
            f"{name} and {first}: the smoothed losses of {len(distances)} steps differ by at most "
            f"{max(distances):.4f}\n"
        )
    try:
        plot_losses(options.image, runs, options.title)
    except (OSError, ValueError) as error:
        parser.error(f"{options.image}: {error}")
    print(end="".join(lines))


if __name__ == "__main__":
    main()
