"""The log of a run: JSON lines, llm.c's text, and TensorBoard's events where that is installed.

A record is a dict with the ``step``, counted from 1, and finite numbers by name. In a folder are

``log.jsonl``
    a record a line, with all its numbers;
``main.log``
    the lines that llm.c's scripts draw: ``s:8 trl:3.2100 lr:0.000600 norm:1.20`` of training,
    ``s:8 tel:3.3000`` of the validation loss, ``s:8 eval:0.2950`` of HellaSwag;
``tensorboard/``
    the same numbers for TensorBoard.

``python -m jaxllm.training.runlog`` draws the losses of several runs, and tells how far they are
apart.
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

from jaxllm.data.files import replacing

Record = Mapping[str, Any]


@contextlib.contextmanager
def open_log(
    folder: str | Path, *, after: int = 0, tensorboard: bool = True
) -> Iterator[Callable[[Record], None]]:
    """Opens the log of a run, and gives the function that writes a record.

    Each line is on its way to the disk when the function returns, so that a process that is killed
    leaves whole lines, but perhaps for the last.

    Args:
        folder: Where the files are; created if it is not there.
        after: Keep what is logged up to this step, and go on from there; 0 begins anew.
        tensorboard: Whether to write events, if the package ``tensorboard`` is installed.
    """
    folder = Path(folder)
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
            jsonl.write(json.dumps({"step": record["step"], **record}) + "\n")
            text.writelines(f"{line}\n" for line in llmc_lines(record))
            if events is not None:
                events(record)

        yield write


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The records of a ``log.jsonl``; a last line that is not whole is left out."""
    return list(filter(None, map(_parsed, Path(path).read_text().splitlines())))


def llmc_lines(record: Record) -> list[str]:
    """A record as llm.c logs it."""
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


def draw_losses(path: str | Path, runs: Mapping[str, Sequence[Record]], title: str) -> None:
    """Draws the training losses over the steps, and the validation losses where there are any.

    Args:
        path: The image to write.
        runs: The records of each run by its name, which may be empty where there is only one.
        title: Stands above.

    Raises:
        ImportError: The package ``matplotlib`` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'drawing needs the package matplotlib: pip install "jaxllm[train]"'
        ) from error
    axes = (figure := Figure(figsize=(8, 5))).subplots()
    # Curves that lie on one another show where the upper one is dashed.
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
    """The training losses by step, averaged with those before, each ``keep`` times the next."""
    total, weight, means = 0.0, 0.0, {}
    for record in records:
        total, weight = keep * total + record["loss"], keep * weight + 1
        means[record["step"]] = total / weight
    return means


def _parsed(line: str) -> dict[str, Any]:
    """The record in a line; empty if it is not whole."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _cut(path: Path, after: int) -> None:
    """Removes what is logged after a step; the file is replaced in one go."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # A line of either form begins with its step.
    step_of = re.compile(r'(?:s:|\{"step": )(\d+)\b.*\n')
    matches = filter(None, map(step_of.fullmatch, lines))
    with replacing(path) as partial:
        partial.write_text("".join(match[0] for match in matches if int(match[1]) <= after))


@contextlib.contextmanager
def _events(folder: Path, kept: Sequence[Record]) -> Iterator[Callable[[Record], None] | None]:
    """What writes a record to TensorBoard's file; None where that is not installed.

    The file is written anew, of the records that are kept: nothing can be removed from one.
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
        description="Draw the losses of runs, and tell how far they are apart.",
    )
    parser.add_argument("image", metavar="IMAGE", type=Path, help="the PNG to write")
    parser.add_argument(
        "logs", metavar="NAME=LOG", nargs="+", help="a log.jsonl, and what to call its run"
    )
    parser.add_argument("--steps", type=int, help="how many of each run's first (default: all)")
    parser.add_argument("--title", default="", help="stands above (default: nothing)")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.9,
        help="in the smoothed loss, what a step counts beside the next (default: %(default)s)",
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
            parser.error(f"{log} is no NAME=LOG")
        if name in runs:
            parser.error(f"two runs are called {name}")
        try:
            records = [record for record in read_log(path) if {"step", "loss"} <= record.keys()]
        except (OSError, UnicodeDecodeError) as error:
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
        draw_losses(options.image, runs, options.title)
    except (OSError, ValueError) as error:
        parser.error(f"{options.image}: {error}")
    print(end="".join(lines))


if __name__ == "__main__":
    main()
