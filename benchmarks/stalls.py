r"""Where the warps of a kernel wait: a table from a profile by Nsight Compute.

JAX must not take all memory at first, because Nsight Compute saves and restores what a kernel may
write::

    XLA_PYTHON_CLIENT_PREALLOCATE=false ncu --clock-control none -k regex:flash_attention \
        --section SourceCounters --section WarpStateStats -o profile python script.py
    ncu -i profile.ncu-rep --page source --print-source sass --csv > profile.csv
    python -m benchmarks.stalls profile.csv

A row is a region of the machine code between two barriers, waits or branches, or one of these: its
first and last instruction, its share of the samples of all warps, how often warps executed it, its
most frequent instructions, and the states in which its samples found the warps. ``selected`` is a
warp that issued an instruction; Nsight Compute's documentation explains the others.
"""

from __future__ import annotations

import argparse
import collections
import csv
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.record import format_table

# Each of them is a region by itself.
BOUNDARIES = ("BAR", "BRA", "SYNCS", "VOTE", "WARPGROUP")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of machine code, with what the profile counted there."""

    text: str
    samples: int
    executed: int  # by warps
    stalls: collections.Counter[str]

    @property
    def name(self) -> str:
        """The operation, without predicate, modifiers and operands: ``HGMMA``."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0].partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Region:
    """Consecutive instructions of a kernel."""

    first: int
    instructions: Sequence[Instruction]

    @property
    def samples(self) -> int:
        """Of all its instructions."""
        return sum(each.samples for each in self.instructions)

    def row(self, samples: int) -> list[str]:
        """Its cells in the table of a kernel with so many samples."""
        names = collections.Counter(each.name for each in self.instructions)
        stalls = sum((each.stalls for each in self.instructions), collections.Counter())
        shares = {name: count / max(self.samples, 1) for name, count in stalls.most_common(4)}
        return [
            f"{self.first} to {self.first + len(self.instructions) - 1}",
            f"{self.samples / samples:.1%}",
            str(max(each.executed for each in self.instructions)),
            ", ".join(f"{name} {count}" for name, count in names.most_common(4))
            + "; "
            + ", ".join(f"{name} {x:.0%}" for name, x in shares.items() if x >= 0.01),
        ]


def read(path: Path) -> dict[str, list[Instruction]]:
    """The instructions of each kernel in a CSV file of the page ``source``.

    Where earlier launches had the same name, a number follows it. Raises ValueError where the file
    has no kernel, or no samples.
    """
    launches: list[tuple[str, list[Instruction]]] = []
    names: list[str] = []
    with path.open(newline="") as file:
        for row in csv.reader(file):
            if row[:1] == ["Kernel Name"]:
                launches.append((row[1], []))
            elif row[:1] == ["Address"]:
                names = row
                if "# Samples" not in names:
                    raise ValueError(f"{path} has no samples: pass --section SourceCounters to ncu")
            elif names and len(row) == len(names):
                launches[-1][1].append(_instruction(dict(zip(names, row, strict=True))))
    if not launches:
        raise ValueError(f"{path} has no kernel: it must be the CSV of ncu --page source")
    kernels: dict[str, list[Instruction]] = {}
    numbers: collections.Counter[str] = collections.Counter()
    for i, (name, instructions) in enumerate(launches):
        if i and launches[i - 1] == (name, instructions):
            continue  # Nsight Compute writes some launches twice
        numbers[name] += 1
        kernels[name if numbers[name] == 1 else f"{name} #{numbers[name]}"] = instructions
    return kernels


def _instruction(cells: dict[str, str]) -> Instruction:
    stalls = {
        name.removeprefix("stall_"): int(count)
        for name, count in cells.items()
        if name.startswith("stall_") and not name.endswith("(Not Issued)")
    }
    return Instruction(
        cells["Source"].strip(),
        int(cells["# Samples"]),
        int(cells["Instructions Executed"]),
        collections.Counter(stalls),
    )


def regions(instructions: Iterable[Instruction]) -> list[Region]:
    """The regions of a kernel, in the order of the machine code."""
    parts: list[list[Instruction]] = [[]]
    for each in instructions:
        if each.name.startswith(BOUNDARIES):
            parts += [[each], []]
        else:
            parts[-1].append(each)
    result, first = [], 0
    for part in parts:
        if part:
            result.append(Region(first, part))
        first += len(part)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each kernel; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stalls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("profile", type=Path, help="a CSV file of ncu --page source")
    parser.add_argument("--kernel", default="", help="only kernels with this in their name")
    parser.add_argument(
        "--least", type=float, default=0.005, help="leave out regions with less of all samples"
    )
    options = parser.parse_args(argv)
    try:
        kernels = read(options.profile)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    chosen = {name: found for name, found in kernels.items() if options.kernel in name}
    if not chosen:
        parser.error(f"--kernel {options.kernel!r} is in no name of {', '.join(kernels)}")
    for name, instructions in chosen.items():
        samples = sum(each.samples for each in instructions)
        least = max(options.least * samples, 1)
        rows = [x.row(samples) for x in regions(instructions) if x.samples >= least]
        print(f"{name}: {samples} samples")
        print(format_table(["region", "samples", "executed", "instructions; states"], rows) + "\n")


if __name__ == "__main__":
    main()
