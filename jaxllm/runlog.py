"""The log of a run: JSON lines, llm.c's text, and TensorBoard's events where that is installed.

A record is a dict with the ``step``, counted from 1, and finite numbers by name. In a folder are

``log.jsonl``
    a record a line, with all its numbers;
``main.log``
    the lines that llm.c's scripts draw: ``s:8 trl:3.2100 lr:0.000600 norm:1.20`` of training,
    ``s:8 tel:3.3000`` of the validation loss, ``s:8 eval:0.2950`` of HellaSwag;
``tensorboard/``
    the same numbers for TensorBoard.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
        events = (
            stack.enter_context(_events(folder / "tensorboard", after)) if tensorboard else None
        )

        def write(record: Record) -> None:
            jsonl.write(json.dumps({"step": record["step"], **record}) + "\n")
            text.writelines(f"{line}\n" for line in llmc_lines(record))
            if events is not None:
                for name, value in record.items():
                    if name != "step":
                        events(name, value, record["step"])

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
        lines.append(
            f"s:{step} trl:{record['loss']:.4f} lr:{record['learning_rate']:.6f} "
            f"norm:{record['grad_norm']:.2f}"
        )
    return lines


def draw_losses(path: str | Path, records: list[dict[str, Any]], title: str) -> None:
    """Draws the training loss over the steps, and the validation loss where there is one.

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
    for name, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(r["step"], r[name]) for r in records if name in r]
        if points:
            axes.plot(*zip(*points, strict=True), style, lw=1, ms=4, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


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
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(match[0] for match in matches if int(match[1]) <= after))
    partial.replace(path)


@contextlib.contextmanager
def _events(folder: Path, after: int) -> Iterator[Callable[[str, float, int], None] | None]:
    """What writes a number to TensorBoard's files; None where that is not installed."""
    try:
        from tensorboard.summary import Writer
    except ImportError:
        yield None
        return
    if not after:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
    writer = Writer(str(folder))
    try:
        yield writer.add_scalar
    finally:
        writer.close()
