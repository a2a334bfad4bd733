"""Draws the charts of the documentation from rows of ``benchmarks/results``.

- ``docs/images/ops.svg``: the ops on one NVIDIA H200 beside XLA, torch.compile and Liger
- ``docs/images/scaling.svg``: training on two and four H100s, as a share of linear scaling

``python -m benchmarks.chart`` draws both. The description of an SVG holds the numbers, so that a
test can compare them with the CSV.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
SHARDED = ROOT / "benchmarks" / "results" / "h100-80gb-hbm3_sharded.csv"
IMAGES = ROOT / "docs" / "images"
CHART = IMAGES / "ops.svg"
SCALING_CHART = IMAGES / "scaling.svg"

# The op as the CSV names it, case, dtype, direction, and the label. Losses are in it too.
ROWS = (
    ("layer_norm", "gpt2_124m", "bfloat16", "forward", "layer_norm 65536x768, forward"),
    ("layer_norm", "gpt2_124m", "bfloat16", "backward", "layer_norm 65536x768, backward"),
    ("rms_norm", "llama3_8b", "bfloat16", "forward", "rms_norm 16384x4096, forward"),
    ("rms_norm", "llama3_8b", "bfloat16", "backward", "rms_norm 16384x4096, backward"),
    ("bias_gelu", "gpt2_124m", "bfloat16", "backward", "bias_gelu 32768x3072, backward"),
    ("swiglu", "llama3_8b", "bfloat16", "forward", "swiglu 16384x14336, forward"),
    ("rope", "llama3_8b", "bfloat16", "forward", "rope 4x4096x32x128, forward"),
    ("embed", "gpt2_124m", "bfloat16", "backward", "embed 64x1024 of 50304x768, backward"),
    ("softmax", "plain_4096", "bfloat16", "forward", "softmax 32768x4096, forward"),
    ("softmax", "plain_4096", "bfloat16", "backward", "softmax 32768x4096, backward"),
    ("relu", "gpt2_124m", "bfloat16", "backward", "relu 32768x3072, backward"),
    ("matmul", "square_4096", "bfloat16", "forward", "matmul 4096 cubed"),
    ("pre_norm_mlp", "gpt2_124m", "bfloat16", "forward", "ffn_block 32768x768x3072, forward"),
    ("pre_norm_mlp", "gpt2_124m", "bfloat16", "backward", "ffn_block 32768x768x3072, backward"),
    (
        "flash_attention", "llama3_8b_batch_4", "bfloat16", "forward",
        "flash_attention 4x4096x32x128, forward",
    ),
    (
        "flash_attention", "llama3_8b_batch_4", "bfloat16", "backward",
        "flash_attention 4x4096x32x128, backward",
    ),
    (
        "cross_entropy", "gpt2_124m", "bfloat16", "gradient",
        "cross_entropy 32768x50304, gradient",
    ),
    (
        "linear_cross_entropy", "gpt2_124m", "bfloat16", "gradient",
        "linear_cross_entropy 32768x768x50304, gradient",
    ),
    ("adamw_update", "gpt2_124m", "float32", "forward", "adamw_update 124M, float32"),
    ("decode_attention", "llama3_8b", "bfloat16", "forward", "decode_attention 1x8192"),
    ("matvec", "llama3_8b_up", "bfloat16", "forward", "matvec 14336x4096"),
    ("quantized_matvec", "llama3_8b_up", "bfloat16", "forward", "quantized_matvec 14336x4096"),
)  # fmt: skip
# Implementation -> its name in the legend, marker and color.
PEERS = {
    "xla": ("XLA (attention: cuDNN)", "o", "#1f77b4"),
    "torch.compile": ("torch.compile", "s", "#d62728"),
    "liger": ("Liger", "^", "#2ca02c"),
}


# The model as the CSV names it, the axis of the mesh, and the label.
SCALING = (
    ("gpt2_d12", "data", "GPT-2 124M, 32x1024 a GPU, data"),
    ("gpt2_d12", "fsdp", "GPT-2 124M, 32x1024 a GPU, fsdp"),
    ("llama3_3.2-1b", "data", "Llama 3.2 1B, 4x4096 a GPU, data"),
    ("llama3_3.2-1b", "fsdp", "Llama 3.2 1B, 4x4096 a GPU, fsdp"),
    ("llama3_3.2-1b", "tensor", "Llama 3.2 1B, 4x4096 in all, tensor"),
    ("llama3_128k_3.2-1b", "context", "Llama 3.2 1B, one sequence of 131,072, context"),
)
# How many GPUs -> marker and color.
GPUS = {"2": ("o", "#1f77b4"), "4": ("s", "#d62728")}


def read(path: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of a CSV file of results."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """What the chart shows: for each of `ROWS`, the times of one commit in microseconds.

    The commit is the newest at which the CUDA kernel and at least one peer were measured; a time
    is the last of that commit. The values are the strings of the CSV.

    Raises:
        ValueError: No commit has both.
    """
    found = []
    for *key, label in ROWS:
        by_commit: dict[str, dict[str, str]] = {}
        for row in rows:
            if [row[name] for name in ("op", "case", "dtype", "direction")] == key and (
                row["median_us"] and row["implementation"] in ("cuda", *PEERS)
            ):
                by_commit.setdefault(row["commit"], {})[row["implementation"]] = row["median_us"]
        complete = [name for name, times in by_commit.items() if len(times) > 1 and "cuda" in times]
        if not complete:
            raise ValueError(f"no commit has the CUDA kernel and a peer for {label}")
        found.append({"label": label, "commit": complete[-1], **by_commit[complete[-1]]})
    return found


def scaling(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """What the chart of scaling shows: for each of `SCALING` the share of linear scaling.

    That is the tokens a second of N GPUs over N times those of one GPU, both at the newest commit
    that has both. Where none has both, each is the newest. One GPU's is the median of its rows.

    Raises:
        ValueError: One GPU or several were not measured.
    """
    found = []
    for model, axis, label in SCALING:
        ours = [row for row in rows if (row["model"], row["implementation"]) == (model, "jaxllm")]
        one = [row for row in ours if row["gpus"] == "1"]
        shown = {"label": label}
        for count in GPUS:
            several = [
                row
                for row in ours
                if (row["mesh"], row["axes"], row["processes"]) == (f"{axis}={count}", "auto", "1")
            ]
            commits = {row["commit"] for row in one}
            both = [row for row in several if row["commit"] in commits] or several
            if not both:
                continue
            of_all = both[-1]
            same = [row for row in one if row["commit"] == of_all["commit"]] or one[-1:]
            if not same:
                raise ValueError(f"one GPU was not measured for {label}")
            of_one = statistics.median(float(row["tokens_per_s"]) for row in same)
            share = float(of_all["tokens_per_s"]) / (int(count) * of_one)
            shown |= {count: f"{share:.3f}", f"commit of {count}": of_all["commit"]}
        if len(shown) == 1:
            raise ValueError(f"several GPUs were not measured for {label}")
        found.append(shown)
    return found


def draw(shown: Sequence[dict[str, str]], path: Path) -> None:
    """Writes the chart of ops as an SVG with `shown` as its description."""
    with _rows_of_markers(shown, path) as (figure, axes):
        for name, (legend, marker, color) in PEERS.items():
            points = [
                (float(row[name]) / float(row["cuda"]), -i)
                for i, row in enumerate(shown)
                if name in row
            ]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker, color=color, label=legend, markersize=5, gid=name, zorder=3)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        ticks = (0.8, 1, 1.5, 2, 3, 5, 9)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(0.75, 10)
        axes.set_xlabel("time / time of the CUDA kernel; right of 1 the CUDA kernel is faster")
        figure.legend(ncols=3, loc="upper center", frameon=False, borderaxespad=0.2)


def draw_scaling(shown: Sequence[dict[str, str]], path: Path) -> None:
    """Writes the chart of scaling as an SVG with `shown` as its description."""
    with _rows_of_markers(shown, path) as (figure, axes):
        for count, (marker, color) in GPUS.items():
            points = [(100 * float(row[count]), -i) for i, row in enumerate(shown) if count in row]
            x, y = zip(*points, strict=True)
            legend = f"{count} H100s"
            axes.plot(x, y, marker, color=color, label=legend, markersize=5, gid=count, zorder=3)
        axes.set_xlim(75, 101)
        axes.set_xlabel("tokens a second, % of linear scaling from one GPU")
        figure.legend(ncols=2, loc="upper center", frameon=False, borderaxespad=0.2)


@contextlib.contextmanager
def _rows_of_markers(shown: Sequence[dict[str, str]], path: Path) -> Iterator[tuple[Any, Any]]:
    """A figure with a row for each of `shown`, and its axes; saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "jaxllm", "font.size": 9}
    with plt.rc_context(style):
        height = 0.22 * len(shown) + 1.1
        figure = plt.figure(figsize=(8, height), facecolor="white")
        axes = figure.add_axes((0.44, 0.55 / height, 0.53, (height - 1.1) / height))
        yield figure, axes
        axes.set_ylim(0.7 - len(shown), 0.7)
        axes.set_yticks(range(0, -len(shown), -1), [row["label"] for row in shown])
        axes.grid(axis="both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": json.dumps(list(shown))}
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the charts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES, help="the folder")
    out = parser.parse_args(argv).out
    if out.exists() and not out.is_dir():
        parser.error(f"--out is {out}; it must be a folder")
    draw(numbers(read()), out / CHART.name)
    draw_scaling(scaling(read(SHARDED)), out / SCALING_CHART.name)


if __name__ == "__main__":
    main()
