"""Real corpora to token shards: ``python -m jaxllm.tokenize OUT_DIR PATH...``.

Text, JSON lines and parquet files go in, a document each file, line or row. Documents are tokenized
by several processes, each document after the end-of-text id, as llm.c has it, and written in their
order into shards: the first is ``val_000000.bin``, unless ``--val-tokens`` is 0, those after it
``train_000001.bin`` and so on.

A run that was stopped goes on with the same command: shards appear whole or not at all, and
``progress.json`` tells at which document the next one begins.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import gzip
import json
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.convert.llmc_shards import write_shard
from jaxllm.data import EXTENSIONS, find_texts
from jaxllm.files import replacing
from jaxllm.tokenizer import Tokenizer, load

TEXTS, LINES, TABLES = EXTENSIONS, (".jsonl", ".ndjson"), (".parquet",)
ENDINGS = (*TEXTS, *LINES, *TABLES)
BATCH_CHARACTERS = 1 << 20  # about as much as a process is given at a time


def files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that are meant: those named, and those in the folders named that are known, sorted.

    Hidden files and folders are passed over in a folder.

    Raises:
        FileNotFoundError: A path does not exist.
    """
    zipped = (f"{ending}.gz" for ending in (*TEXTS, *LINES))
    return find_texts(paths, (*ENDINGS, *zipped))


def documents(paths: Iterable[Path], *, key: str = "text") -> Iterator[tuple[str, float]]:
    """The texts of files, in their order, each with the bytes of the file that it stands for.

    Args:
        paths: Files: ``.jsonl`` has an object a line, ``.parquet`` a row a document, any other is
            one text. ``.gz`` may come after the ending of a text or of lines.
        key: The field or column that holds the text.

    Raises:
        ImportError: A parquet file, and the package ``pyarrow`` is not installed.
        ValueError: A line or a table has no such text, a text is not UTF-8, or a file is damaged.
    """
    for path in paths:
        yield from (_read_table if _ending(path) in TABLES else _read_lines)(path, key)


def _ending(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _read_lines(path: Path, key: str) -> Iterator[tuple[str, float]]:
    """The documents of a text, or of lines."""
    with (
        _naming(path, EOFError, gzip.BadGzipFile, zlib.error),
        path.open("rb") as raw,
        gzip.open(raw) if path.suffix == ".gz" else raw as file,
    ):
        if _ending(path) not in LINES:
            try:
                yield file.read().decode(), path.stat().st_size
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: not UTF-8: {error}") from error
            return
        place = 0
        for number, line in enumerate(file, 1):
            before, place = place, raw.tell()
            if line.strip():
                try:
                    text = json.loads(line)[key]
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: no object with {key!r}") from error
                yield _checked(text, f"{path}, line {number}: {key!r}"), place - before


def _read_table(path: Path, key: str) -> Iterator[tuple[str, float]]:
    """The documents of a parquet file."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ImportError(
            'parquet files need the package pyarrow: pip install "jaxllm[data]"'
        ) from error
    with _naming(path, ArrowInvalid), parquet.ParquetFile(path) as table:
        if key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise ValueError(f"{path}: no column {key!r}; there are {names}")
        size = path.stat().st_size / max(table.metadata.num_rows, 1)
        for batch in table.iter_batches(batch_size=1024, columns=[key]):
            for text in batch.column(0).to_pylist():
                yield _checked(text, f"{path}: column {key!r}"), size


@contextlib.contextmanager
def _naming(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Makes errors of a damaged file into one that names it."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{path}: damaged, or not what its name says: {error}") from error


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{where} holds {type(text).__name__}, no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can name half of a character
        raise ValueError(f"{where} is no text: {error}") from error
    return text


@dataclasses.dataclass
class Progress:
    """How far a folder is, as ``progress.json`` has it.

    Attributes:
        recipe: What the shards are made from and how; another recipe makes other shards.
        shards: How many are complete.
        tokens: How many tokens they hold.
        document: The number of the document with which the next shard begins, counted from 0.
        offset: How many of its tokens are in the shards already.
        finished: Whether nothing is left to do.
    """

    recipe: dict[str, Any]
    shards: int = 0
    tokens: int = 0
    document: int = 0
    offset: int = 0
    finished: bool = False

    @classmethod
    def read(cls, folder: Path, recipe: dict[str, Any]) -> Progress:
        """What there is in a folder, or a beginning.

        Raises:
            FileExistsError: The folder holds something else, or shards of another recipe.
            ValueError: ``progress.json`` is not what :meth:`write` writes.
        """
        path = folder / "progress.json"
        if not path.exists():
            if folder.exists() and any(folder.glob("*.bin")):
                raise FileExistsError(
                    f"{folder}: has shards and no progress.json; give a new folder"
                )
            return cls(recipe)
        try:
            progress = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not as it was written: {error}") from error
        if not (progress.shards or progress.finished):
            return cls(recipe)  # nothing was made of the old recipe
        if differing := [name for name in recipe if progress.recipe.get(name) != recipe[name]]:
            name = differing[0]
            raise FileExistsError(
                f"{folder}: has shards with {name} {progress.recipe.get(name)!r}, and now it is "
                f"{recipe[name]!r}; give a new folder or delete this one"
            )
        return progress

    def write(self, folder: Path) -> None:
        """Replaces the file in one go."""
        with replacing(folder / "progress.json") as partial:
            partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def tokenize(
    folder: str | Path,
    paths: Sequence[str | Path],
    *,
    tokenizer: str = "gpt2",
    key: str = "text",
    shard_tokens: int = 100_000_000,
    val_tokens: int = 10_000_000,
    workers: int | None = None,
    show_progress: bool = False,
) -> Progress:
    """Makes shards of a corpus; goes on where an earlier call was stopped.

    Equal documents give equal shards, however many processes there are and however often it was
    stopped.

    Args:
        folder: Where the shards go.
        paths: Files and folders; see :func:`files` and :func:`documents`.
        tokenizer: As in :func:`jaxllm.tokenizer.load`. A vocabulary of more than 65536 ids makes
            shards of Llama 3's kind.
        key: As in :func:`documents`.
        shard_tokens: The length of every training shard but the last.
        val_tokens: The length of the validation shard, the first; 0 for none.
        workers: Processes beside this one; 0 for none, None for one a processor.
        show_progress: Draw a bar.

    Raises:
        FileExistsError: The folder has shards of another corpus or tokenizer.
        FileNotFoundError: A path does not exist, or there is no file to read in any.
        ImportError: A package is not installed.
        ValueError: A number is out of range, a file is not what it should be, or the corpus does
            not fill the validation shard.
    """
    for name, value, least in (("shard_tokens", shard_tokens, 1), ("val_tokens", val_tokens, 0)):
        if not least <= value < 2**31:
            raise ValueError(f"{name} is {value}; it must be at least {least} and below 2**31")
    folder, inputs = Path(folder), files(paths)
    if not inputs:
        raise FileNotFoundError(
            f"{', '.join(map(str, paths))}: no file found that ends in {', '.join(ENDINGS)}"
        )
    sizes = [path.stat().st_size for path in inputs]
    recipe = {
        "files": [list(pair) for pair in zip(map(str, inputs), sizes, strict=True)],
        "tokenizer": tokenizer,
        "key": key,
        "shard_tokens": shard_tokens,
        "val_tokens": val_tokens,
    }
    progress = Progress.read(folder, recipe)
    if progress.finished:
        return progress
    kind = "gpt2" if load(tokenizer).vocab_size <= 2**16 else "llama3"
    folder.mkdir(parents=True, exist_ok=True)
    progress.write(folder)

    def write(tokens: np.ndarray, document: int, offset: int) -> None:
        """Writes the next shard; the one after it begins in this document."""
        held_out = val_tokens and not progress.shards
        name = f"{'val' if held_out else 'train'}_{progress.shards:06}.bin"
        write_shard(folder / name, tokens, kind=kind)
        progress.shards += 1
        progress.tokens += len(tokens)
        progress.document, progress.offset = document, offset
        progress.write(folder)

    with _bar(sum(sizes), show_progress) as bar, _encoder(tokenizer, workers) as encode:

        def unread() -> Iterator[str]:
            for number, (text, size) in enumerate(documents(inputs, key=key)):
                bar.update(size)
                if number >= progress.document:
                    yield text

        number, pending, waiting = progress.document, [], 0
        cut = progress.offset  # of the first document, which the last shard has begun
        for tokens in encode(unread()):
            pending.append(tokens[cut:])
            waiting, cut = waiting + len(pending[-1]), 0
            while waiting >= (
                size := shard_tokens if progress.shards else val_tokens or shard_tokens
            ):
                joined = np.concatenate(pending)
                pending, waiting = [joined[size:]], waiting - size
                # All that is left is of this document.
                place = (number, len(tokens) - waiting) if waiting else (number + 1, 0)
                write(joined[:size], *place)
                bar.set_postfix(shards=progress.shards, tokens=f"{progress.tokens:,}")
            number += 1
        if val_tokens and progress.shards + (waiting > 0) < 2:
            raise ValueError(
                f"the corpus has {progress.tokens + waiting} tokens, and val_tokens is "
                f"{val_tokens}: nothing is left to train on"
            )
        progress.finished = True
        if waiting:
            write(np.concatenate(pending), number, 0)
        progress.write(folder)
    return progress


def _bar(total: int, shown: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            'the progress bar needs the package tqdm: pip install "jaxllm[data]"'
        ) from error
    return tqdm(total=total, unit="B", unit_scale=True, disable=not shown, dynamic_ncols=True)


@contextlib.contextmanager
def _encoder(
    tokenizer: str, workers: int | None
) -> Iterator[Callable[[Iterable[str]], Iterator[np.ndarray]]]:
    """Gives a function from documents to their tokens, which processes work at ahead of time."""
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers == 0:
        encode = functools.partial(_encode, load(tokenizer))
        yield lambda texts: (tokens for batch in _batches(texts) for tokens in encode(batch))
        return
    # Not by a fork: JAX has threads.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer,)
    )

    def encode_ahead(texts: Iterable[str]) -> Iterator[np.ndarray]:
        results: collections.deque[concurrent.futures.Future] = collections.deque()
        for batch in _batches(texts):
            results.append(pool.submit(_work, batch))
            if len(results) > 2 * workers:  # a bound on what is in memory
                yield from results.popleft().result()
        while results:
            yield from results.popleft().result()

    try:
        yield encode_ahead
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of about :data:`BATCH_CHARACTERS`."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Each document's tokens, after the id that stands between two."""
    encoded = map(tokenizer.encode, texts)
    return [np.concatenate([np.array([tokenizer.end_of_text], x.dtype), x]) for x in encoded]


_worker_tokenizer: Tokenizer | None = None  # of a process of the pool


def _start_worker(name: str) -> None:
    global _worker_tokenizer
    _worker_tokenizer = load(name)


def _work(texts: list[str]) -> list[np.ndarray]:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, texts)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of ``python -m jaxllm.tokenize``; a mistake exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="OUT_DIR", help="where the shards go")
    add("paths", metavar="PATH", nargs="+", help="a text, .jsonl or .parquet, or a folder of them")
    add("--tokenizer", default="gpt2", help="gpt2, bytes, a tokenizer.json, or a .bin of llm.c's")
    add("--key", default="text", help="the field or column that holds the text")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N")
    add(
        "--val-tokens", type=int, default=10_000_000, metavar="N", help="the first so many; 0: none"
    )
    add("--workers", type=int, metavar="N", help="processes; default: one a processor")
    options = parser.parse_args(argv)
    try:
        progress = tokenize(**vars(options), show_progress=True)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.folder}: {progress.shards} shards, {progress.tokens:,} tokens")


if __name__ == "__main__":
    main()
