"""Token shards: building them from text, reading them, and drawing batches.

The file format is llm.c's, so its shards work here and ours there: see
:mod:`jaxllm.convert.llmc_shards`, whose ``read_shard`` and ``write_shard`` are here too.

``python -m jaxllm.data OUT_DIR PATH...`` builds shards from text files.
"""

from __future__ import annotations

import argparse
import bisect
import codecs
import dataclasses
import functools
import glob
import sysconfig
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jaxllm.convert.llmc_shards import read_shard, write_shard
from jaxllm.data.compression import plain_name, read_bytes
from jaxllm.data.documents import ENDINGS, TEXTS
from jaxllm.data.files import check_new, new_folder, walk
from jaxllm.data.tokenizer import BYTES, Tokenizer

EXTENSIONS = TEXTS
# What is passed over in a Python installation: what is not the library proper, and the files that
# an installation fills in with its own paths and compiler flags.
STANDARD_LIBRARY_SKIP = ("site-packages", "dist-packages", "test", "tests", "idlelib")
STANDARD_LIBRARY_SKIP += ("_sysconfigdata*", "config-*", "sitecustomize.py")


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Tokens in several shards, in the order of their names.

    Attributes:
        shards: The tokens of each shard, uint16 or uint32.
        name: What messages call it.
    """

    shards: tuple[np.ndarray, ...]
    name: str = "the data set"

    @property
    def num_tokens(self) -> int:
        """The tokens of all shards together."""
        return sum(len(shard) for shard in self.shards)


def open_dataset(shards: str | Path | Sequence[str | Path]) -> Dataset:
    """Opens shards as one data set.

    Args:
        shards: A glob pattern, such as ``"data/stdlib/train_*.bin"``, or a list of files.

    Raises:
        FileNotFoundError: The pattern matches nothing, the list is empty, or a file is missing.
        ValueError: A file is not a shard; see :func:`read_shard`.
    """
    if isinstance(shards, str | Path):
        name, paths = str(shards), sorted(glob.glob(str(shards)))  # noqa: PTH207
    else:
        name, paths = ", ".join(map(str, shards)), list(shards)
    if not paths:
        raise FileNotFoundError(f"{name or 'an empty list'}: no shards found")
    return Dataset(tuple(read_shard(path) for path in paths), name)


def open_split(folder: str | Path, split: str) -> Dataset:
    """Opens the shards of a folder with ``split`` in their names, such as ``"val"``.

    Raises:
        FileNotFoundError: There is none.
        ValueError: A file is not a shard; see :func:`read_shard`.
    """
    return open_dataset(Path(glob.escape(str(folder)), f"*{split}*.bin"))


def num_windows(dataset: Dataset, seq_len: int) -> int:
    """How many samples of ``seq_len`` tokens (and one more label) an epoch has.

    Windows do not overlap and do not cross shards; the tail of a shard is left out.
    """
    return int(_windows_by_shard(dataset, seq_len).sum())


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Refuses a data set with tokens that a model does not know; reads all of it.

    Raises:
        ValueError: A token is not below ``vocab_size``.
    """
    largest = max(int(shard.max(initial=0)) for shard in dataset.shards)
    if largest >= vocab_size:
        raise ValueError(f"{dataset.name} has token {largest}, but the model has {vocab_size}")


def _windows_by_shard(dataset: Dataset, seq_len: int) -> np.ndarray:
    counts = [max(len(shard) - 1, 0) // seq_len for shard in dataset.shards]
    return np.array(counts, np.int64)


@functools.lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits its windows; cached, as each batch asks for it."""
    order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(windows)
    order.setflags(write=False)
    return order


def batch(
    dataset: Dataset, batch_size: int, seq_len: int, *, seed: int, step: int
) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """The samples of one training step: a pure function of the seed and the step.

    Every window of the data set comes once an epoch, in an order drawn anew from the seed for each
    epoch; a batch may end one epoch and begin the next. As nothing is remembered between calls, a
    run that resumes at a step sees what it would have seen without the interruption.

    Args:
        dataset: The tokens.
        batch_size: B, the number of windows.
        seq_len: T, the tokens in each.
        seed: Chooses the orders; at least 0.
        step: The number of batches before this one; at least 0.

    Returns:
        ``(tokens, labels)``, where the labels are the tokens one place further on.

    Raises:
        ValueError: The data set is shorter than one window, or a number is out of range.
    """
    _check_at_least(
        batch_size=(batch_size, 1), seq_len=(seq_len, 1), seed=(seed, 0), step=(step, 0)
    )
    counts = _windows_by_shard(dataset, seq_len)
    ends = np.cumsum(counts)
    windows = int(ends[-1]) if len(ends) else 0
    if windows == 0:
        raise ValueError(
            f"{dataset.name}: the longest shard has {_longest(dataset)} tokens; "
            f"one window of {seq_len} needs {seq_len + 1}"
        )
    samples = np.empty((batch_size, seq_len + 1), np.int32)
    for row in range(batch_size):
        epoch, place = divmod(step * batch_size + row, windows)
        window = int(_order(windows, seed, epoch)[place])
        shard = int(np.searchsorted(ends, window, side="right"))
        start = (window - int(ends[shard] - counts[shard])) * seq_len
        samples[row] = dataset.shards[shard][start : start + seq_len + 1]
    return samples[:, :-1], samples[:, 1:]


def batch_in_order(
    dataset: Dataset, batch_size: int, seq_len: int, *, index: int, rank: int = 0, ranks: int = 1
) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """A batch in the order in which llm.c reads the shards without shuffling.

    Within a shard batch i of rank r is the B*T + 1 tokens from ``(i * ranks + r) * B * T`` on; when
    no further one fits, the next shard follows, and after the last the first again.

    Args:
        dataset: The tokens.
        batch_size: B, the windows of one rank.
        seq_len: T, the tokens in each.
        index: The number of batches before this one; at least 0.
        rank: Which of the ranks this is.
        ranks: How many processes share the data.

    Returns:
        ``(tokens, labels)``, where the labels are the tokens one place further on.

    Raises:
        ValueError: No shard holds a batch of all ranks, or a number is out of range.
    """
    _check_at_least(batch_size=(batch_size, 1), seq_len=(seq_len, 1), index=(index, 0))
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; it must be at least 0 and less than them")
    # Python's integers: an offset may be beyond 32 bits.
    together = ranks * batch_size * seq_len
    ends = np.cumsum(_windows_by_shard(dataset, together)).tolist()
    if not ends or ends[-1] == 0:
        raise ValueError(
            f"{dataset.name}: the longest shard has {_longest(dataset)} tokens; one batch of "
            f"{ranks} x {batch_size} x {seq_len} needs {together + 1}"
        )
    place = index % ends[-1]
    shard = bisect.bisect_right(ends, place)
    first = ends[shard - 1] if shard else 0
    start = (place - first) * together + rank * batch_size * seq_len
    tokens = dataset.shards[shard][start : start + batch_size * seq_len + 1].astype(np.int32)
    shape = batch_size, seq_len
    return tokens[:-1].reshape(shape), tokens[1:].reshape(shape)


def _longest(dataset: Dataset) -> int:
    return max(map(len, dataset.shards), default=0)


def _check_at_least(**numbers: tuple[int, int]) -> None:
    """Raises ValueError with the name of a number that is below its least."""
    for name, (value, least) in numbers.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def standard_library() -> Path:
    """The folder of the running Python's own library: some 10 MB of text that is always there."""
    return Path(sysconfig.get_path("stdlib"))


def find_texts(
    paths: Iterable[str | Path], extensions: Sequence[str] = EXTENSIONS, skip: Sequence[str] = ()
) -> list[Path]:
    """The files to build from: those named, and those found in the folders named.

    Args:
        paths: Files, taken whatever their name, and folders, searched recursively.
        extensions: The file name endings that are taken from a folder, in any case of letters, and
            before an ending of a compression: ``.txt.gz``.
        skip: Patterns, such as ``"test*"``, for the names of files and folders that are passed
            over in a folder. Hidden ones always are.

    Returns:
        The files in the order of ``paths``, a folder's own sorted, none twice.

    Raises:
        FileNotFoundError: A path does not exist.
        PermissionError: A folder cannot be opened.
    """
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder")
        found += _in_folder(path, extensions, skip) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _in_folder(root: Path, extensions: Sequence[str], skip: Sequence[str]) -> list[Path]:
    found = []
    for path, reason in walk(root, skip):
        if reason.startswith("cannot be opened"):
            raise PermissionError(f"{path}: {reason}")
        if not reason and plain_name(path).endswith(tuple(map(str.lower, extensions))):
            found.append(path)
    return found


@dataclasses.dataclass(frozen=True)
class Summary:
    """What :func:`build` wrote.

    Attributes:
        folder: Where the shards are: ``train_000000.bin`` and so on, and ``val_000000.bin``.
        files: The numbers of text files in the training and the validation split.
        tokens: Likewise the numbers of tokens.
        skipped: Files of the folders that are left out because they are not UTF-8.
    """

    folder: Path
    files: tuple[int, int]
    tokens: tuple[int, int]
    skipped: tuple[Path, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {split:5} {files:6,} files {tokens:12,} tokens"
            for split, files, tokens in zip(("train", "val"), self.files, self.tokens, strict=True)
        ]
        lines += [f"skipped, not UTF-8: {path}" for path in self.skipped]
        return "\n".join(lines)


def build(
    folder: str | Path,
    paths: Iterable[str | Path],
    *,
    extensions: Sequence[str] = EXTENSIONS,
    skip: Sequence[str] = (),
    val_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
    tokenizer: Tokenizer = BYTES,
) -> Summary:
    """Builds training and validation shards from text files; equal files give equal shards.

    Each document is followed by the tokenizer's end-of-text id. The folder appears only once it is
    complete. Files may be compressed by gzip, zstd, bzip2 or xz.

    Args:
        folder: The folder to create.
        paths: Text files and folders; see :func:`find_texts`.
        extensions: The file name endings that are taken from a folder.
        skip: Patterns for names that are passed over in a folder.
        val_fraction: The share of the files that is held out, evenly spread over their order; at
            least one file if there are two. 0 holds out none.
        shard_tokens: The length of every shard but a split's last.
        tokenizer: Turns the texts into ids.

    Raises:
        FileExistsError: The folder exists and is not empty.
        FileNotFoundError: A path does not exist, or there is no text in any.
        PermissionError: A file or a folder cannot be opened.
        ValueError: ``val_fraction`` or ``shard_tokens`` is out of range. A file is damaged; or it
            was named, and is not UTF-8 or has rows of documents, which :mod:`jaxllm.data.tokenize`
            reads. The tokenizer has more ids than two bytes hold; that module writes four.
    """
    folder, paths = Path(folder), list(paths)
    if tokenizer.vocab_size > 2**16:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids; a shard holds ids of 0 to "
            "65535"
        )
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}; it must be at least 0 and less than 1")
    if not 1 <= shard_tokens < 2**31:
        raise ValueError(f"shard_tokens is {shard_tokens}; it must be at least 1 and below 2**31")
    check_new(folder)

    texts, skipped, named = [], [], {path for path in map(Path, paths) if not path.is_dir()}
    for path in find_texts(paths, extensions, skip):
        ending = Path(plain_name(path)).suffix
        if path in named and ending in ENDINGS and ending not in (*TEXTS, *extensions):
            raise ValueError(
                f"{path}: has documents in rows, as its name says, which python -m "
                f"jaxllm.data.tokenize reads; with the extension {ending} (--extensions) it is "
                "taken as one text"
            )
        data = read_bytes(path).removeprefix(codecs.BOM_UTF8)
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if path in named:
                raise ValueError(f"{path}: not UTF-8: {error}") from error
            skipped.append(path)
        else:
            texts.append(data)
    if not any(texts):
        raise FileNotFoundError(
            f"{', '.join(map(str, paths))}: no text found with extension {', '.join(extensions)}"
        )
    fraction = Fraction(val_fraction)
    if fraction and len(texts) > 1:
        fraction = max(fraction, Fraction(1, len(texts)))
    held_out = [int((i + 1) * fraction) > int(i * fraction) for i in range(len(texts))]
    splits = {
        "train": [text for text, held in zip(texts, held_out, strict=True) if not held],
        "val": [text for text, held in zip(texts, held_out, strict=True) if held],
    }

    with new_folder(folder) as partial:
        tokens = [
            _write_split(partial, split, texts, shard_tokens, tokenizer)
            for split, texts in splits.items()
        ]
    files = (len(splits["train"]), len(splits["val"]))
    return Summary(folder, files, (tokens[0], tokens[1]), tuple(skipped))


def _write_split(
    folder: Path, split: str, texts: list[bytes], shard_tokens: int, tokenizer: Tokenizer
) -> int:
    """Writes one split's shards; returns its number of tokens."""
    pending: list[np.ndarray] = []
    total = waiting = shards = 0

    def write(tokens: np.ndarray) -> None:
        nonlocal shards
        write_shard(folder / f"{split}_{shards:06}.bin", tokens)
        shards += 1

    for text in texts:
        pending += [tokenizer.encode(text), np.array([tokenizer.end_of_text], np.uint16)]
        waiting += len(pending[-2]) + 1
        total += len(pending[-2]) + 1
        if waiting >= shard_tokens:
            joined = np.concatenate(pending)
            full = waiting // shard_tokens * shard_tokens
            for start in range(0, full, shard_tokens):
                write(joined[start : start + shard_tokens])
            pending, waiting = [joined[full:]], waiting - full
    if waiting:
        write(np.concatenate(pending))
    return total


def ensure_standard_library(folder: str | Path = "data/stdlib") -> Path:
    """The folder of the default corpus, built from :func:`standard_library` if it is missing.

    Two processes may ask at once: each builds its own, and the first to finish is kept.

    Args:
        folder: Where it is, or is to be.
    """
    folder = Path(folder)
    if not (folder.is_dir() and any(folder.iterdir())):
        try:
            build(folder, [standard_library()], extensions=(".py",), skip=STANDARD_LIBRARY_SKIP)
        except OSError:
            if not any(folder.glob("*.bin")):  # else another process was faster
                raise
    return folder


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of ``python -m jaxllm.data``; a mistake exits with status 2.

    Args:
        argv: The arguments; None for the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.data", description="Build llm.c token shards from text files."
    )
    parser.add_argument("folder", metavar="OUT_DIR", help="the folder to create")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a text file, or a folder of them")
    parser.add_argument(
        "--extensions",
        default=",".join(EXTENSIONS),
        help="what to take from folders, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--skip",
        default="",
        help="names to pass over in folders, such as 'test*', comma-separated (default: none)",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.05,
        help="the share of the files that is held out (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=100_000_000,
        help="tokens in a shard (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    try:
        summary = build(
            options.folder,
            options.paths,
            extensions=options.extensions.split(","),
            skip=options.skip.split(","),
            val_fraction=options.val_fraction,
            shard_tokens=options.shard_tokens,
        )
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(summary)
