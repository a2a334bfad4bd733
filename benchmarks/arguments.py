"""Checks of command-line arguments that the benchmarks share, before anything is timed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import append_rows


def check_counts(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """Exits with a message if one of these options is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def check_csv(parser: argparse.ArgumentParser, path: Path | None, columns: Sequence[str]) -> None:
    """Exits with a message if no rows of these columns can be appended to ``--csv``."""
    if path is None:
        return
    try:
        append_rows(path, columns, [])
    except (OSError, ValueError) as error:
        parser.error(f"--csv: {error}")
