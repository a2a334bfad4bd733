"""Draws ``docs/images/ops.svg``: the ops on one NVIDIA H200 beside XLA, torch.compile and Liger.

``python -m benchmarks.chart`` reads ``benchmarks/results/h200.csv``. The SVG's description holds
the numbers, so that a test can compare them with the CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
CHART = ROOT / "docs" / "images" / "ops.svg"

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


def draw(shown: Sequence[dict[str, str]], path: Path) -> None:
    """Writes the chart as an SVG with `shown` as its description."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "jaxllm", "font.size": 9}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(8, 0.22 * len(shown) + 1.1), facecolor="white")
        height = 0.22 * len(shown) / (0.22 * len(shown) + 1.1)
        axes = figure.add_axes((0.44, 0.55 / (0.22 * len(shown) + 1.1), 0.53, height))
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
        axes.set_ylim(0.7 - len(shown), 0.7)
        axes.set_yticks(range(0, -len(shown), -1), [row["label"] for row in shown])
        axes.grid(axis="both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.set_xlabel("time / time of the CUDA kernel; right of 1 the CUDA kernel is faster")
        figure.legend(ncols=3, loc="upper center", frameon=False, borderaxespad=0.2)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": json.dumps(list(shown))}
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=CHART)
    draw(numbers(read()), parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
