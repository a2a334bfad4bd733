"""The provenance of a row of results, and the CSV file that it is appended to."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PROVENANCE = ("date", "commit", "gpu", "driver", "jax", "jaxlib", "torch", "cuda")


def provenance(device: tuple[str, str] | None = None) -> dict[str, str]:
    """The machine and the versions of this run.

    Args:
        device: The GPU's name and the version of CUDA; with None JAX reports them, and starts its
            backend.
    """
    gpu, cuda = device or _jax_device()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "torch": _version("torch"),
        "cuda": cuda,
    }


def _jax_device() -> tuple[str, str]:
    import jax
    from jax.extend.backend import get_backend

    cuda = re.search(r"cuda (\d+)", get_backend().platform_version.lower())
    # 13000 is 13.0.
    version = f"{int(cuda[1]) // 1000}.{int(cuda[1]) % 1000 // 10}" if cuda else ""
    return jax.devices()[0].device_kind, version


def commit() -> str:
    """The short commit, with "+dirty" if files differ from it.

    JAXLLM_COMMIT takes precedence: a copy of the tree on another machine may lack the history.
    """
    if named := os.environ.get("JAXLLM_COMMIT"):
        return named
    # A copy of the tree may be inside another repository: only this tree's .git counts.
    head = _output("git", "rev-parse", "--short", "HEAD") if (ROOT / ".git").exists() else ""
    return (
        head + ("+dirty" if _output("git", "status", "--porcelain") else "") if head else "unknown"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """The first line of a command's output; "" if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def slug(gpu: str) -> str:
    """A file name for a device kind: ``"NVIDIA H200"`` gives ``"h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-") or "unknown"


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a CSV file, with a header if the file is new.

    Raises:
        ValueError: The file has another header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != list(columns):
            raise ValueError(f"{path} has the header {header}; these rows have {list(columns)}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: the first and the last column left-aligned, the others right-aligned."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    left = {0, len(header) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return "\n".join(lines)
