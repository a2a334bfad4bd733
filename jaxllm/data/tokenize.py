"""Tokenizes a corpus into shards: ``python -m jaxllm.data.tokenize OUT_DIR PATH...``.

The input is text, JSON and parquet files, read by :mod:`jaxllm.data.documents`. Several processes
tokenize the documents. The end-of-text id precedes each document, as in llm.c. The first shard is
``val_000000.bin``, unless ``--val-tokens`` is 0. The others are ``train_000001.bin`` and so on.

To resume a stopped run, repeat the command. Shards are written atomically, and ``progress.json``
stores the document at which the next shard begins. A document that cannot be read stops the run;
``--skip-bad N`` skips up to N of them.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.data import documents
from jaxllm.data.checks import as_bool, as_integer, as_list
from jaxllm.data.documents import Document, Fault, LeftOut
from jaxllm.data.files import digest_of, replacing
from jaxllm.data.shard_format import write_shard
from jaxllm.data.tokenizer import Tokenizer, file_of, load

BATCH_CHARACTERS = 1 << 20  # the approximate size of a worker's task
_SHOWN = 20  # the number of items to print of a list


@dataclasses.dataclass
class Progress:
    """The state of a run, stored in ``progress.json``.

    Attributes:
        recipe: The files and options that determine the shards. A run resumes only with an equal
            recipe, but that of an older run may lack the digests. The digest of the files reads the
            first and the last 64 KiB of each: a change between them is not noticed if it keeps the
            size. That of the tokenizer reads its file, but not the configs beside it.
        shards: The number of complete shards.
        tokens: The number of tokens in them.
        document: The index of the document with which the next shard begins. Skipped documents
            count.
        offset: The number of tokens of that document in the complete shards.
        finished: Whether the run is complete.
        skipped: A line for each fault before that document: file, row and reason.
        bad: The number of documents lost to those faults.
        left_out: A line for each file that is not read: file and reason.
    """

    recipe: dict[str, Any]
    shards: int = 0
    tokens: int = 0
    document: int = 0
    offset: int = 0
    finished: bool = False
    skipped: list[str] = dataclasses.field(default_factory=list)
    bad: int = 0
    left_out: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, recipe: dict[str, Any]) -> Progress:
        """Reads the progress in a folder; an empty progress if there is none.

        Raises:
            FileExistsError: The folder has shards without ``progress.json``, or shards of another
                recipe.
            ValueError: ``progress.json`` is damaged.
        """
        path = folder / "progress.json"
        if not path.exists():
            if folder.exists() and any(folder.glob("*.bin")):
                raise FileExistsError(
                    f"{folder}: has shards and no progress.json; use a new folder"
                )
            return cls(recipe)
        try:
            progress = cls(**json.loads(path.read_bytes()))
            for field, initial in dataclasses.asdict(cls({})).items():
                if type(getattr(progress, field)) is not type(initial):
                    raise TypeError(f"{field} is {getattr(progress, field)!r}")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: damaged: {error}") from error
        if not (progress.shards or progress.finished):
            return cls(recipe)  # there are no shards of the old recipe
        found = {key: recipe[key] for key in recipe if key.endswith("_digest")} | progress.recipe
        if differing := [name for name in recipe if found.get(name) != recipe[name]]:
            name = differing[0]
            raise FileExistsError(
                f"{folder}: has shards with {name} {found.get(name)!r}, and now it is "
                f"{recipe[name]!r}; use a new folder or delete this one"
            )
        return progress

    def write(self, folder: Path) -> None:
        """Writes ``progress.json`` atomically."""
        with replacing(folder / "progress.json") as partial:
            partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def __str__(self) -> str:
        files, read = len(self.recipe.get("files", ())), self.document - len(self.skipped)
        lines = [
            f"{files:,} files, {read:,} documents, {self.tokens:,} tokens in {self.shards:,} shards"
        ]
        if self.skipped:
            lines += [f"skipped {self.bad:,} bad documents:", *_shortened(self.skipped)]
        if self.left_out:
            lines += [f"left out {len(self.left_out):,} files:", *_shortened(self.left_out)]
        return "\n".join(lines)


def _shortened(sentences: list[str]) -> Iterator[str]:
    yield from (f"  {sentence}" for sentence in sentences[:_SHOWN])
    if len(sentences) > _SHOWN:
        yield f"  and {len(sentences) - _SHOWN:,} more, in progress.json"


def tokenize(
    folder: str | Path,
    paths: Sequence[str | Path],
    *,
    tokenizer: str | Path = "gpt2",
    end_of_text: str | None = None,
    key: str = "text",
    format: str | None = None,
    skip_bad: int = 0,
    shard_tokens: int = 100_000_000,
    val_tokens: int = 10_000_000,
    workers: int | None = None,
    show_progress: bool = False,
) -> Progress:
    """Tokenizes a corpus into shards, or resumes an earlier call that was stopped.

    The shards depend only on the documents and the options, not on the number of workers or
    interruptions.

    Args:
        folder: The folder of the shards, created if it does not exist.
        paths: Files and folders; see :func:`jaxllm.data.documents.find`.
        tokenizer: The name of a tokenizer, as in :func:`jaxllm.data.tokenizer.load`. A vocabulary
            of more than 65536 ids makes shards of kind ``"llama3"``.
        end_of_text: The name of the token before each document; None for the tokenizer's default.
        key: The field that holds the text, as in :func:`jaxllm.data.documents.read`.
        format: The format of every file; None to detect it by name and contents.
        skip_bad: The number of documents to skip if they cannot be read or tokenized. One more
            raises ValueError.
        shard_tokens: The length of each training shard, except for the last.
        val_tokens: The length of the validation shard, which is the first; 0 for none.
        workers: The number of worker processes; 0 to tokenize in this process, None for one per
            CPU.
        show_progress: Show a progress bar, and print which files are left out.

    Returns:
        The progress. ``str(progress)`` is a summary.

    Raises:
        ChildProcessError: A worker process died, for example because memory ran out.
        FileExistsError: The folder has shards of another corpus or other options.
        FileNotFoundError: A path does not exist, or a folder has no file to read.
        ImportError: A package is not installed.
        TypeError: A number is not an integer, ``show_progress`` is not a bool, ``paths`` is one
            path instead of a list, ``key`` is not a string, or ``tokenizer`` is neither a
            string nor a path.
        ValueError: An argument is out of range; the format of a file in ``paths`` is not supported;
            there are more bad documents than ``skip_bad``; the corpus is empty; or it does not
            fill the validation shard.
    """
    shard_tokens = _as_count("shard_tokens", shard_tokens, 1)
    val_tokens = _as_count("val_tokens", val_tokens, 0)
    skip_bad = _as_count("skip_bad", skip_bad, 0)
    workers = None if workers is None else as_integer("workers", workers, least=0)
    show_progress = as_bool("show_progress", show_progress)
    if not isinstance(tokenizer, str | Path):
        raise TypeError(f"tokenizer is {tokenizer!r}; it must be the name of one, or a path")
    folder, paths, tokenizer = Path(folder), as_list("paths", paths), str(tokenizer)
    sources, left_out = documents.find(paths, key=key, format=format)
    sizes = [path.stat().st_size for path, _ in sources]
    vocabulary = file_of(tokenizer)
    recipe = {
        "files": [[str(path), size] for (path, _), size in zip(sources, sizes, strict=True)],
        "tokenizer": tokenizer,
        "end_of_text": end_of_text,
        "key": key,
        "format": format,
        "shard_tokens": shard_tokens,
        "val_tokens": val_tokens,
        "files_digest": digest_of(path for path, _ in sources),
        "tokenizer_digest": None if vocabulary is None else digest_of([vocabulary], block=2**30),
    }
    progress = Progress.read(folder, recipe)
    if progress.finished:
        return progress
    progress.left_out = list(map(str, left_out))
    if show_progress and left_out:
        _print_left_out(left_out)
    encoding = load(tokenizer, end_of_text=end_of_text)
    kind = "gpt2" if encoding.vocab_size <= 2**16 else "llama3"
    folder.mkdir(parents=True, exist_ok=True)
    progress.write(folder)

    def write(tokens: np.ndarray, document: int, offset: int) -> None:
        """Writes the next shard. The shard after it begins in ``document`` at ``offset``."""
        held_out = val_tokens and not progress.shards
        name = f"{'val' if held_out else 'train'}_{progress.shards:06}.bin"
        write_shard(folder / name, tokens, kind=kind)
        progress.shards += 1
        progress.tokens += len(tokens)
        progress.document, progress.offset = document, offset
        progress.write(folder)

    def skip(fault: Fault) -> None:
        progress.bad += fault.count
        progress.skipped.append(str(fault))
        if progress.bad > skip_bad:
            raise ValueError(
                f"{fault} (bad documents so far: {progress.bad:,}; skip_bad, --skip-bad, is "
                f"{skip_bad:,})"
            )

    with _bar(sum(sizes), show_progress) as bar, _encoder(encoding, workers) as encode:

        def unread() -> Iterator[Document | Fault]:
            for number, document in enumerate(documents.read(sources, key=key)):
                bar.update(document.size)
                if number >= progress.document:
                    yield document

        number, pending, waiting = progress.document, [], 0
        cut = progress.offset  # tokens of the first document that are in an earlier shard
        for tokens in encode(unread()):
            if isinstance(tokens, Fault):
                skip(tokens)
                tokens = np.zeros(0, np.uint16)
            pending.append(tokens[cut:])
            waiting, cut = waiting + len(pending[-1]), 0
            while waiting >= (
                size := shard_tokens if progress.shards else val_tokens or shard_tokens
            ):
                joined = np.concatenate(pending)
                pending, waiting = [joined[size:]], waiting - size
                # The remaining tokens are all from this document.
                position = (number, len(tokens) - waiting) if waiting else (number + 1, 0)
                write(joined[:size], *position)
                bar.set_postfix(shards=progress.shards, tokens=f"{progress.tokens:,}")
            number += 1
        if not progress.shards and not waiting:
            raise ValueError(
                f"{', '.join(map(str, paths))}: no documents found in {len(sources)} files"
            )
        if val_tokens and progress.shards + (waiting > 0) < 2:
            raise ValueError(
                f"the corpus has {progress.tokens + waiting} tokens, and val_tokens is "
                f"{val_tokens}: nothing is left to train on"
            )
        progress.finished, progress.document, progress.offset = True, number, 0
        if waiting:
            write(np.concatenate(pending), number, 0)
        progress.write(folder)
    return progress


def _as_count(name: str, value: int, least: int) -> int:
    if not least <= (count := as_integer(name, value)) < 2**31:
        raise ValueError(f"{name} is {value}; it must be at least {least} and below 2**31")
    return count


def _bar(total: int, shown: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            'the progress bar needs the package tqdm: pip install "jaxllm[data]"'
        ) from error
    return tqdm(total=total, unit="B", unit_scale=True, disable=not shown, dynamic_ncols=True)


def _print_left_out(left_out: Sequence[LeftOut]) -> None:
    """Prints the number of files left out for each reason, with one example each."""
    for reason, count in collections.Counter(one.reason for one in left_out).items():
        first = next(one.path for one in left_out if one.reason == reason)
        others = f" and {count - 1:,} more" if count > 1 else ""
        print(f"left out: {first}{others}: {reason}", file=sys.stderr)


Encoded = np.ndarray | Fault


@contextlib.contextmanager
def _encoder(
    tokenizer: Tokenizer, workers: int | None
) -> Iterator[Callable[[Iterable[Document | Fault]], Iterator[Encoded]]]:
    """Starts the worker processes.

    Yields:
        A function from documents to their tokens, in order. Workers run ahead of the consumer.
    """
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers == 0:

        def encode_here(rows: Iterable[Document | Fault]) -> Iterator[Encoded]:
            for batch in _batches(rows):
                yield from _joined(batch, _encode(tokenizer, _texts(batch)))

        yield encode_here
        return
    # Spawn instead of fork, because JAX has threads.
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer,)
    )

    def encode_ahead(rows: Iterable[Document | Fault]) -> Iterator[Encoded]:
        results: collections.deque = collections.deque()

        def first() -> Iterator[Encoded]:
            batch, future = results.popleft()
            try:
                encoded = future.result()
            except concurrent.futures.process.BrokenProcessPool as error:
                last = results[-1][0] if results else batch
                raise ChildProcessError(
                    f"a worker died at a document from {batch[0].where} to {last[-1].where}; if "
                    f"memory ran out, use fewer than {workers} workers ({error})"
                ) from error
            return _joined(batch, encoded)

        for batch in _batches(rows):
            try:
                future = pool.submit(_work, _texts(batch))
            except concurrent.futures.process.BrokenProcessPool as error:
                future = concurrent.futures.Future()
                future.set_exception(error)
            results.append((batch, future))
            if len(results) > 2 * workers:  # limits the batches in memory
                yield from first()
        while results:
            yield from first()

    try:
        yield encode_ahead
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(rows: Iterable[Document | Fault]) -> Iterator[list[Document | Fault]]:
    """Groups documents into lists of about :data:`BATCH_CHARACTERS`. A fault ends its list."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += len(row.text) + 1 if isinstance(row, Document) else BATCH_CHARACTERS
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _texts(batch: list[Document | Fault]) -> list[str]:
    return [row.text for row in batch if isinstance(row, Document)]


def _joined(
    batch: list[Document | Fault], encoded: list[np.ndarray | str]
) -> Iterator[np.ndarray | Fault]:
    """Merges the encoded texts of a batch with its faults, in order. A string is an error."""
    results = iter(encoded)
    for row in batch:
        result = row if isinstance(row, Fault) else next(results)
        yield Fault(row.where, result) if isinstance(result, str) else result


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray | str]:
    """The tokens of each text, after the end-of-text id; an error message if encoding fails."""
    encoded: list[np.ndarray | str] = []
    for text in texts:
        try:
            tokens = tokenizer.encode(text)
        except Exception as error:  # tokenizer packages raise any type
            encoded.append(f"cannot be tokenized: {str(error) or type(error).__name__}")
        else:
            begin = np.array([tokenizer.end_of_text], tokens.dtype)
            encoded.append(np.concatenate([begin, tokens]))
    return encoded


_worker_tokenizer: Tokenizer | None = None  # set in each worker process


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer


def _work(texts: list[str]) -> list[np.ndarray | str]:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, texts)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of ``python -m jaxllm.data.tokenize``. Wrong usage exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.data.tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="OUT_DIR", help="the folder of the shards")
    add("paths", metavar="PATH", nargs="+", help="a text, JSON or parquet file, or a folder")
    add("--tokenizer", default="gpt2", help="gpt2, bytes, a tokenizer.json, or llm.c's .bin")
    add("--end-of-text", metavar="NAME", help="the token before each document; default: detected")
    add("--key", default="text", help="the field or column that holds the text; a.b: b in a")
    add("--format", choices=documents.FORMATS, help="of all files; default: by name and contents")
    add("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad documents")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens per shard")
    add(
        "--val-tokens",
        type=int,
        default=10_000_000,
        metavar="N",
        help="use the first N tokens for validation; 0: none",
    )
    add("--workers", type=int, metavar="N", help="processes; default: one per CPU")
    options = parser.parse_args(argv)
    try:
        progress = tokenize(**vars(options), show_progress=True)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.folder}: {progress}")


if __name__ == "__main__":
    main()
