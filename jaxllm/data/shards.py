"""Builds token shards from text files, and reads batches from shards.

The file format is llm.c's, so either program reads the other's shards. See
:mod:`jaxllm.data.shard_format`.

``python -m jaxllm.data OUT_DIR PATH...`` builds shards from text files.
"""

from __future__ import annotations

import argparse
import bisect
import codecs
import dataclasses
import functools
import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer

from jaxllm.data import document_mask
from jaxllm.data.checks import as_bool, as_integer, as_list
from jaxllm.data.compression import plain_name, read_bytes
from jaxllm.data.documents import ENDINGS, TEXTS
from jaxllm.data.files import check_new, new_folder, walk
from jaxllm.data.shard_format import read_shard, write_shard
from jaxllm.data.tokenizer import BYTES, Tokenizer

EXTENSIONS = TEXTS
# Skipped in a Python installation: packages and tests, and files that hold the installation's own
# paths and compiler flags.
STANDARD_LIBRARY_SKIP = ("site-packages", "dist-packages", "test", "tests", "idlelib")
STANDARD_LIBRARY_SKIP += ("_sysconfigdata*", "config-*", "sitecustomize.py")
_DIGEST_BLOCK = 4096  # tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Tokens in several shards, in the order of their names.

    Attributes:
        shards: The tokens of each shard, uint16 or uint32.
        name: The name in error messages.

    Raises:
        TypeError: A shard is not an array.
        ValueError: A shard has not one axis.
    """

    shards: tuple[np.ndarray, ...]
    name: str = "the data set"

    def __post_init__(self) -> None:
        for i, shard in enumerate(self.shards):
            if not hasattr(shard, "dtype"):
                raise TypeError(f"shards[{i}] has type {type(shard).__name__}; it must be an array")
            if shard.ndim != 1:
                raise ValueError(f"shards[{i}] has shape {shard.shape}; it must have one axis")

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all shards."""
        return sum(len(shard) for shard in self.shards)

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the shards, in hexadecimal, to tell whether a run resumes with its data.

        It depends on the number and the order of the shards, the length of each, and its tokens in
        four blocks of 4096: the first, the last, and two between them. It notices other texts,
        another tokenizer, and other shards of the same tokens. It does not notice changes outside
        of these blocks. The names and the dtype of the shards have no influence.
        """
        found = hashlib.sha256()
        for shard in self.shards:
            found.update(f"{len(shard)} ".encode())
            last = max(len(shard) - _DIGEST_BLOCK, 0)
            for start in (0, last // 3, 2 * last // 3, last):
                block = np.asarray(shard[start : start + _DIGEST_BLOCK])
                found.update(block.astype("<i8").tobytes())
        return found.hexdigest()[:16]


def open_dataset(shards: str | Path | Sequence[str | Path]) -> Dataset:
    """Opens shards as one data set.

    Args:
        shards: A glob pattern, such as ``"data/stdlib/train_*.bin"``, or a list of files.

    Raises:
        FileNotFoundError: The pattern matches nothing, the list is empty, or a file is missing.
        ValueError: A file is not a shard.
    """
    if isinstance(shards, str | Path):
        name, paths = str(shards), sorted(glob.glob(str(shards)))  # noqa: PTH207
    else:
        paths = list(shards)
        name = ", ".join(map(str, paths))
    if not paths:
        raise FileNotFoundError(f"{name or 'an empty list'}: no shards found")
    return Dataset(tuple(read_shard(path) for path in paths), name)


def open_split(folder: str | Path, split: str) -> Dataset:
    """Opens the shards of a folder with ``split`` in their names, such as ``"val"``.

    Raises:
        FileNotFoundError: The folder has no such shard.
        ValueError: A file is not a shard, or has both ``train`` and ``val`` in its name.
    """
    pattern = Path(glob.escape(str(folder)), f"*{split}*.bin")
    for path in sorted(glob.glob(str(pattern))):  # noqa: PTH207
        if all(name in Path(path).name for name in ("train", "val")):
            raise ValueError(f"{path}: a shard of both splits by its name; rename it")
    return open_dataset(pattern)


def num_windows(dataset: Dataset, seq_len: int) -> int:
    """The number of windows of ``seq_len`` tokens in an epoch.

    Windows do not overlap and do not cross shards. The remaining tokens of a shard are not used.

    Raises:
        TypeError: ``seq_len`` is not an integer.
        ValueError: ``seq_len`` is below 1.
    """
    seq_len = as_integer("seq_len", seq_len, least=1)
    return int(_windows_by_shard(dataset, seq_len).sum())


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Checks that all tokens of a data set are in a model's vocabulary. Reads the whole data set.

    Raises:
        TypeError: ``vocab_size`` is not an integer.
        ValueError: A token is below 0 or not below ``vocab_size``; the message names the first one,
            its file, and its position there, from 0.
    """
    vocab_size = as_integer("vocab_size", vocab_size)
    largest = max((int(shard.max(initial=0)) for shard in dataset.shards), default=-1)
    signed = [shard for shard in dataset.shards if shard.dtype.kind != "u"]
    least = min((int(shard.min(initial=0)) for shard in signed), default=0)
    if least >= 0 and largest < vocab_size:
        return
    for number, shard in enumerate(dataset.shards):
        if (wrong := (shard >= vocab_size) | (shard < 0)).any():
            position = int(np.argmax(wrong))
            file = getattr(shard, "filename", None) or f"shard {number}"
            raise ValueError(
                f"{dataset.name} has token {least if least < 0 else largest}, but the model has "
                f"{vocab_size}; the first that it has not is {shard[position]}, at position "
                f"{position} of {file}"
            )


def _windows_by_shard(dataset: Dataset, seq_len: int) -> np.ndarray:
    counts = [max(len(shard) - 1, 0) // seq_len for shard in dataset.shards]
    return np.array(counts, np.int64)


@functools.lru_cache(maxsize=4)
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """The random order of the windows in an epoch; cached, because each batch needs it."""
    order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(windows)
    order.setflags(write=False)
    return order


def batch(
    dataset: Dataset,
    batch_size: int,
    seq_len: int,
    *,
    seed: int,
    step: int,
    rows: range | None = None,
    end_of_text: int | None = None,
    ignore_next_document: bool = False,
) -> tuple[Int32[np.ndarray, "*B T"], ...]:
    """The batch of one training step, a pure function of the seed and the step.

    An epoch visits every window once. Each epoch has its own random order, from the seed. A batch
    may span the end of one epoch and the start of the next. There is no state between calls, so a
    resumed run reads the same batches as an uninterrupted one.

    Args:
        dataset: The tokens.
        batch_size: B, the number of windows.
        seq_len: T, the number of tokens in a window.
        seed: The seed of the random orders; at least 0.
        step: The number of batches before this one; at least 0.
        rows: Read only these windows of the batch, such as ``range(4, 8)``; None for all. So each
            of several processes can read its part of one batch.
        end_of_text: The token between documents, to also return the document of each token and
            its position there, which mask attention by document. None for neither.
        ignore_next_document: With ``end_of_text``: whether labels that begin another document are
            -1, which a loss ignores. See :func:`jaxllm.data.ignore_next_document`.

    Returns:
        ``(tokens, labels)``, int32 of shape (B, T), or (len(rows), T). The labels are the tokens
        shifted by one. With ``end_of_text``, ``(tokens, labels, segment_ids, positions)``, all of
        this shape: see :func:`jaxllm.data.find_documents`.

    Raises:
        TypeError: ``batch_size``, ``seq_len``, ``seed``, ``step`` or ``end_of_text`` is not an
            integer, ``rows`` is not a range, or ``ignore_next_document`` is not a bool.
        ValueError: The data set is shorter than one window, an argument is out of range, a token is
            above 2**31 - 1, or ``ignore_next_document`` is true without ``end_of_text``.
    """
    batch_size = as_integer("batch_size", batch_size, least=1)
    seq_len = as_integer("seq_len", seq_len, least=1)
    seed, step = as_integer("seed", seed, least=0), as_integer("step", step, least=0)
    rows = _check_rows(rows, batch_size)
    documents = _check_documents(end_of_text, ignore_next_document)
    counts = _windows_by_shard(dataset, seq_len)
    ends = np.cumsum(counts)
    windows = int(ends[-1]) if len(ends) else 0
    if windows == 0:
        raise ValueError(
            f"{dataset.name}: the longest shard has {_longest(dataset)} tokens; "
            f"one window of {seq_len} needs {seq_len + 1}"
        )
    for shard in dataset.shards:
        _check_integers(dataset, shard)
    samples = np.empty((len(rows), seq_len + 1), np.int32)
    for i, row in enumerate(rows):
        epoch, index = divmod(step * batch_size + row, windows)
        window = int(_order(windows, seed, epoch)[index])
        number = int(np.searchsorted(ends, window, side="right"))
        start = (window - int(ends[number] - counts[number])) * seq_len
        samples[i] = _as_int32(dataset, dataset.shards[number][start : start + seq_len + 1])
    return _with_documents(samples[:, :-1], samples[:, 1:], *documents)


def batch_in_order(
    dataset: Dataset,
    batch_size: int,
    seq_len: int,
    *,
    index: int,
    rank: int = 0,
    ranks: int = 1,
    rows: range | None = None,
    end_of_text: int | None = None,
    ignore_next_document: bool = False,
) -> tuple[Int32[np.ndarray, "*B T"], ...]:
    """A batch in llm.c's sequential order, without shuffling.

    Within a shard, batch i of rank r is the B*T + 1 tokens from ``(i * ranks + r) * B * T`` on. The
    next shard follows when no further batch fits. The first shard follows the last.

    Args:
        dataset: The tokens.
        batch_size: B, the number of windows per rank.
        seq_len: T, the number of tokens in a window.
        index: The number of batches before this one; at least 0.
        rank: The rank of this process.
        ranks: The number of processes that share the data.
        rows: Read only these windows of the batch; None for all.
        end_of_text: As in :func:`batch`.
        ignore_next_document: As in :func:`batch`.

    Returns:
        ``(tokens, labels)``, int32 of shape (B, T), or (len(rows), T). The labels are the tokens
        shifted by one. With ``end_of_text``, ``(tokens, labels, segment_ids, positions)``, all of
        this shape: see :func:`jaxllm.data.find_documents`.

    Raises:
        TypeError: A size, ``index``, ``rank`` or ``ranks`` is not an integer, or as in
            :func:`batch`.
        ValueError: No shard is long enough for a batch of all ranks, or as in :func:`batch`.
    """
    batch_size = as_integer("batch_size", batch_size, least=1)
    seq_len = as_integer("seq_len", seq_len, least=1)
    index = as_integer("index", index, least=0)
    rank, ranks = as_integer("rank", rank, least=0), as_integer("ranks", ranks, least=1)
    rows = _check_rows(rows, batch_size)
    documents = _check_documents(end_of_text, ignore_next_document)
    if rank >= ranks:
        raise ValueError(f"rank is {rank}; it must be at least 0 and less than ranks, {ranks}")
    # Python integers, because an offset may exceed 32 bits.
    together = ranks * batch_size * seq_len
    ends = np.cumsum(_windows_by_shard(dataset, together)).tolist()
    if not ends or ends[-1] == 0:
        raise ValueError(
            f"{dataset.name}: the longest shard has {_longest(dataset)} tokens; one batch of "
            f"{ranks} x {batch_size} x {seq_len} needs {together + 1}"
        )
    position = index % ends[-1]
    shard = bisect.bisect_right(ends, position)
    first = ends[shard - 1] if shard else 0
    start = (position - first) * together + (rank * batch_size + rows.start) * seq_len
    tokens = dataset.shards[shard][start : start + len(rows) * seq_len + 1]
    tokens = _as_int32(dataset, tokens)
    shape = len(rows), seq_len
    tokens, labels = tokens[:-1].reshape(shape), tokens[1:].reshape(shape)
    return _with_documents(tokens, labels, *documents)


def _with_documents(
    tokens: np.ndarray, labels: np.ndarray, end_of_text: int | None, ignore_next_document: bool
) -> tuple[np.ndarray, ...]:
    """A batch, and with ``end_of_text`` the segment ids and positions of its tokens."""
    if end_of_text is None:
        return tokens, labels
    documents = document_mask.find_documents(tokens, end_of_text)
    if ignore_next_document:
        labels = document_mask.ignore_next_document(tokens, labels, end_of_text)
    return tokens, labels, *documents


def _check_documents(
    end_of_text: int | None, ignore_next_document: bool
) -> tuple[int | None, bool]:
    """The options of a batch's documents; TypeError or ValueError if they are invalid."""
    ignore_next_document = as_bool("ignore_next_document", ignore_next_document)
    if end_of_text is not None:
        return as_integer("end_of_text", end_of_text, least=0), ignore_next_document
    if ignore_next_document:
        raise ValueError("ignore_next_document is True; it needs end_of_text")
    return None, False


def _check_rows(rows: range | None, batch_size: int) -> range:
    """The rows to read.

    Raises:
        TypeError: ``rows`` is not a range.
        ValueError: They are not consecutive rows of the batch.
    """
    if rows is None:
        return range(batch_size)
    if not isinstance(rows, range):
        raise TypeError(f"rows is {rows!r}; it must be a range, or None for all rows")
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= batch_size:
        raise ValueError(f"rows is {rows}; it must be consecutive rows of a batch of {batch_size}")
    return rows


def _longest(dataset: Dataset) -> int:
    return max(map(len, dataset.shards), default=0)


def _as_int32(dataset: Dataset, tokens: Integer[np.ndarray, "*B T"]) -> Int32[np.ndarray, "*B T"]:
    """The tokens in the dtype of a batch.

    Raises:
        TypeError: They are not integers.
        ValueError: A token is not from 0 to 2**31 - 1.
    """
    _check_integers(dataset, tokens)
    least, largest = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if least < 0:
        raise ValueError(f"{dataset.name} has token {least}; a token is at least 0")
    if largest >= 2**31:
        raise ValueError(
            f"{dataset.name} has token {largest}; the largest in a batch is 2147483647"
        )
    return tokens.astype(np.int32)


def _check_integers(dataset: Dataset, tokens: np.ndarray) -> None:
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"{dataset.name} has dtype {tokens.dtype}; its shards must have integers")


def standard_library() -> Path:
    """The folder of Python's standard library, about 10 MB of text on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def find_texts(
    paths: Iterable[str | Path], extensions: Sequence[str] = EXTENSIONS, skip: Sequence[str] = ()
) -> list[Path]:
    """Lists the text files in files and folders.

    Args:
        paths: Files, of any name, and folders, which are searched recursively.
        extensions: The file name endings to select in a folder, in upper or lower case. The ending
            of a compression may follow: ``.txt.gz``.
        skip: Patterns, such as ``"test*"``, for names of files and folders to skip in a folder.
            Hidden files and folders are always skipped, and so are links to nothing.

    Returns:
        The files in the order of ``paths``, sorted within a folder, without duplicates.

    Raises:
        FileNotFoundError: A path does not exist.
        PermissionError: A folder cannot be opened.
        TypeError: An argument is one string or path instead of a list.
    """
    extensions, skip = as_list("extensions", extensions), as_list("skip", skip)
    found = []
    for path in map(Path, as_list("paths", paths)):
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder")
        found += _in_folder(path, extensions, skip) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _in_folder(root: Path, extensions: Sequence[str], skip: Sequence[str]) -> list[Path]:
    found = []
    for path, reason in walk(root, skip):
        if reason.startswith("cannot be opened"):
            raise PermissionError(f"{path}: {reason}")
        is_text = plain_name(path).endswith(tuple(map(str.lower, extensions)))
        if not reason and is_text and path.is_file():
            found.append(path)
    return found


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of :func:`build`.

    Attributes:
        folder: The folder of the shards: ``train_000000.bin`` and so on, and ``val_000000.bin``.
        files: The numbers of text files in the training and the validation split.
        tokens: The numbers of tokens in the training and the validation split.
        skipped: Files in the folders that were skipped because they are not UTF-8.
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
    """Builds training and validation shards from text files. Equal files give equal shards.

    The tokenizer's end-of-text id follows each document. The folder is created atomically. Files
    may be compressed by gzip, zstd, bzip2 or xz.

    Args:
        folder: The folder to create.
        paths: Text files and folders; see :func:`find_texts`.
        extensions: The file name endings to select in a folder.
        skip: Patterns for names to skip in a folder.
        val_fraction: The share of the files in the validation split, evenly spread over their
            order. If there are two files or more, at least one is held out. 0 holds out none.
        shard_tokens: The length of each shard, except for the last of a split.
        tokenizer: The tokenizer.

    Returns:
        The numbers of files and tokens.

    Raises:
        FileExistsError: The folder exists and is not empty.
        FileNotFoundError: A path does not exist, or no text was found.
        PermissionError: A file or a folder cannot be opened.
        TypeError: ``paths``, ``extensions`` or ``skip`` is one string instead of a list;
            ``val_fraction`` is not a number; ``shard_tokens`` is not an integer; or ``tokenizer``
            is not a :class:`~jaxllm.data.tokenizer.Tokenizer`, but for example its name.
        ValueError: ``val_fraction`` or ``shard_tokens`` is out of range. Or a file is damaged. Or a
            file in ``paths`` is not UTF-8, or holds rows of documents (use
            :mod:`jaxllm.data.tokenize`). Or the vocabulary exceeds 16 bits (that module supports
            it).
    """
    folder, paths = Path(folder), as_list("paths", paths)
    extensions, skip = as_list("extensions", extensions), as_list("skip", skip)
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(
            f"tokenizer is {tokenizer!r}; it must be a Tokenizer, as from "
            "jaxllm.data.tokenizer.load"
        )
    if tokenizer.vocab_size > 2**16:
        raise ValueError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids; a shard holds ids 0 to "
            "65535. python -m jaxllm.data.tokenize supports more"
        )
    fraction, shard_tokens = _as_fraction(val_fraction), as_integer("shard_tokens", shard_tokens)
    if not 1 <= shard_tokens < 2**31:
        raise ValueError(f"shard_tokens is {shard_tokens}; it must be at least 1 and below 2**31")
    check_new(folder)

    texts, skipped, named = [], [], {path for path in map(Path, paths) if not path.is_dir()}
    for path in find_texts(paths, extensions, skip):
        ending = Path(plain_name(path)).suffix
        if path in named and ending in ENDINGS and ending not in (*TEXTS, *extensions):
            raise ValueError(
                f"{path}: {ending} files hold rows of documents; use python -m "
                f"jaxllm.data.tokenize. To read the file as one text, add {ending} to --extensions"
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


def _as_fraction(val_fraction: float) -> Fraction:
    """The share of the files that are held out; TypeError or ValueError if it is invalid."""
    try:
        if isinstance(val_fraction, str | bytes):  # which float() would read
            raise TypeError("a string")
        fraction = val_fraction if isinstance(val_fraction, Fraction) else float(val_fraction)
    except (TypeError, ValueError) as error:
        raise TypeError(f"val_fraction is {val_fraction!r}; it must be a number") from error
    if not 0 <= fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}; it must be at least 0 and less than 1")
    return Fraction(fraction)


def _write_split(
    folder: Path, split: str, texts: list[bytes], shard_tokens: int, tokenizer: Tokenizer
) -> int:
    """Writes the shards of one split; returns its number of tokens."""
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
    """Builds the default corpus from :func:`standard_library` if it does not exist.

    If two processes call this at once, each builds the corpus, and the first to finish wins.

    Args:
        folder: The folder of the corpus.

    Returns:
        The folder.
    """
    folder = Path(folder)
    if not (folder.is_dir() and any(folder.iterdir())):
        try:
            build(folder, [standard_library()], extensions=(".py",), skip=STANDARD_LIBRARY_SKIP)
        except OSError:
            if not any(folder.glob("*.bin")):  # otherwise another process finished first
                raise
    return folder


def _names(text: str) -> list[str]:
    """The names in a comma-separated list; an empty one would be the ending of every file."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of ``python -m jaxllm.data``. Wrong usage exits with status 2.

    Args:
        argv: The arguments; None for ``sys.argv``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.data", description="Build llm.c token shards from text files."
    )
    parser.add_argument("folder", metavar="OUT_DIR", help="the folder to create")
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a text file, or a folder of them")
    parser.add_argument(
        "--extensions",
        default=",".join(EXTENSIONS),
        help="file name endings to select in folders, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--skip",
        default="",
        help="names to skip in folders, such as 'test*', comma-separated (default: none)",
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.05,
        help="the share of the files in the validation split (default: %(default)s)",
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
            extensions=_names(options.extensions),
            skip=_names(options.skip),
            val_fraction=options.val_fraction,
            shard_tokens=options.shard_tokens,
        )
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(summary)
