"""Real corpora to token shards: ``python -m jaxllm.data.tokenize OUT_DIR PATH...``.

Text, JSON and parquet files go in, compressed or not; :mod:`jaxllm.data.documents` reads them.
Documents are tokenized by several processes, each document after the end-of-text id, as llm.c has
it, and written in their order into shards: the first is ``val_000000.bin``, unless
``--val-tokens`` is 0, those after it ``train_000001.bin`` and so on.

A run that was stopped goes on with the same command: shards appear whole or not at all, and
``progress.json`` tells at which document the next one begins. A document that cannot be read stops
the run, unless ``--skip-bad`` allows for it.
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

from jaxllm.convert.llmc_shards import write_shard
from jaxllm.data import documents
from jaxllm.data.documents import Document, Fault, LeftOut
from jaxllm.data.files import replacing
from jaxllm.data.tokenizer import Tokenizer, load

BATCH_CHARACTERS = 1 << 20  # about as much as a process is given at a time
_SHOWN = 20  # of a list that is printed


@dataclasses.dataclass
class Progress:
    """How far a folder is, as ``progress.json`` has it.

    Attributes:
        recipe: What the shards are made from and how; another recipe makes other shards.
        shards: How many are complete.
        tokens: How many tokens they hold.
        document: The number of the document with which the next shard begins, counted from 0. A
            document that was skipped counts.
        offset: How many of its tokens are in the shards already.
        finished: Whether nothing is left to do.
        skipped: What was skipped before that document, a sentence each: file, row, reason.
        bad: How many documents those are.
        left_out: The files in the folders that are not read, a sentence each.
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
            progress = cls(**json.loads(path.read_bytes()))
            for field, initial in dataclasses.asdict(cls({})).items():
                if type(getattr(progress, field)) is not type(initial):
                    raise TypeError(f"{field} is {getattr(progress, field)!r}")
        except (ValueError, TypeError, RecursionError) as error:
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
    tokenizer: str = "gpt2",
    end_of_text: str | None = None,
    key: str = "text",
    format: str | None = None,
    skip_bad: int = 0,
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
        paths: Files and folders; see :func:`jaxllm.data.documents.find`.
        tokenizer: As in :func:`jaxllm.data.tokenizer.load`. A vocabulary of more than 65536 ids
            makes shards of Llama 3's kind.
        end_of_text: The name of the token before each document; None for the tokenizer's own.
        key: The field that holds the text, as in :func:`jaxllm.data.documents.read`.
        format: How to read every file; None to tell by name and contents.
        skip_bad: How many documents that cannot be read or tokenized are skipped. One more ends the
            call.
        shard_tokens: The length of every training shard but the last.
        val_tokens: The length of the validation shard, the first; 0 for none.
        workers: Processes beside this one; 0 for none, None for one a processor.
        show_progress: Draw a bar, and print which files are left out.

    Returns:
        What was done: printed, it is a summary.

    Raises:
        ChildProcessError: A process died, as when memory is short.
        FileExistsError: The folder has shards of another corpus or tokenizer.
        FileNotFoundError: A path does not exist, or a folder holds no file to read.
        ImportError: A package is not installed.
        ValueError: A number is out of range, a file that was named cannot be read as any, there are
            more bad documents than ``skip_bad``, or the corpus is empty or does not fill the
            validation shard.
    """
    for name, value, least in (
        ("shard_tokens", shard_tokens, 1),
        ("val_tokens", val_tokens, 0),
        ("skip_bad", skip_bad, 0),
    ):
        if not least <= value < 2**31:
            raise ValueError(f"{name} is {value}; it must be at least {least} and below 2**31")
    folder = Path(folder)
    sources, left_out = documents.find(paths, key=key, format=format)
    sizes = [path.stat().st_size for path, _ in sources]
    recipe = {
        "files": [[str(path), size] for (path, _), size in zip(sources, sizes, strict=True)],
        "tokenizer": tokenizer,
        "end_of_text": end_of_text,
        "key": key,
        "format": format,
        "shard_tokens": shard_tokens,
        "val_tokens": val_tokens,
    }
    progress = Progress.read(folder, recipe)
    if progress.finished:
        return progress
    progress.left_out = list(map(str, left_out))
    if show_progress and left_out:
        _tell_left_out(left_out)
    encoding = load(tokenizer, end_of_text=end_of_text)
    kind = "gpt2" if encoding.vocab_size <= 2**16 else "llama3"
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
        cut = progress.offset  # of the first document, which the last shard has begun
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
                # All that is left is of this document.
                place = (number, len(tokens) - waiting) if waiting else (number + 1, 0)
                write(joined[:size], *place)
                bar.set_postfix(shards=progress.shards, tokens=f"{progress.tokens:,}")
            number += 1
        if not progress.shards and not waiting:
            raise ValueError(
                f"{', '.join(map(str, paths))}: no document found in {len(sources)} files"
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


def _bar(total: int, shown: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            'the progress bar needs the package tqdm: pip install "jaxllm[data]"'
        ) from error
    return tqdm(total=total, unit="B", unit_scale=True, disable=not shown, dynamic_ncols=True)


def _tell_left_out(left_out: Sequence[LeftOut]) -> None:
    """Prints, before the work begins, how many files are left out for which reason."""
    for reason, count in collections.Counter(one.reason for one in left_out).items():
        first = next(one.path for one in left_out if one.reason == reason)
        others = f" and {count - 1:,} more" if count > 1 else ""
        print(f"left out: {first}{others}: {reason}", file=sys.stderr)


Encoded = np.ndarray | Fault


@contextlib.contextmanager
def _encoder(
    tokenizer: Tokenizer, workers: int | None
) -> Iterator[Callable[[Iterable[Document | Fault]], Iterator[Encoded]]]:
    """Gives a function from documents to their tokens, which processes work at ahead of time."""
    workers = os.cpu_count() or 1 if workers is None else workers
    if workers == 0:

        def encode_here(rows: Iterable[Document | Fault]) -> Iterator[Encoded]:
            for batch in _batches(rows):
                yield from _joined(batch, _encode(tokenizer, _texts(batch)))

        yield encode_here
        return
    # Not by a fork: JAX has threads.
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
                    f"a process died at a document from {batch[0].where} to {last[-1].where}; is "
                    f"memory short for {workers} workers? ({error})"
                ) from error
            return _joined(batch, encoded)

        for batch in _batches(rows):
            try:
                future = pool.submit(_work, _texts(batch))
            except concurrent.futures.process.BrokenProcessPool as error:
                future = concurrent.futures.Future()
                future.set_exception(error)
            results.append((batch, future))
            if len(results) > 2 * workers:  # a bound on what is in memory
                yield from first()
        while results:
            yield from first()

    try:
        yield encode_ahead
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(rows: Iterable[Document | Fault]) -> Iterator[list[Document | Fault]]:
    """Documents in lists of about :data:`BATCH_CHARACTERS`; a fault ends its list."""
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
    """The tokens of a batch, in its order; faults where it has one, or what there is says why."""
    results = iter(encoded)
    for row in batch:
        result = row if isinstance(row, Fault) else next(results)
        yield Fault(row.where, result) if isinstance(result, str) else result


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray | str]:
    """Each document's tokens, after the id that stands between two; or why it has none."""
    encoded: list[np.ndarray | str] = []
    for text in texts:
        try:
            tokens = tokenizer.encode(text)
        except Exception as error:  # whatever the package raises
            encoded.append(f"cannot be tokenized: {str(error) or type(error).__name__}")
        else:
            begin = np.array([tokenizer.end_of_text], tokens.dtype)
            encoded.append(np.concatenate([begin, tokens]))
    return encoded


_worker_tokenizer: Tokenizer | None = None  # of a process of the pool


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer


def _work(texts: list[str]) -> list[np.ndarray | str]:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, texts)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line of ``python -m jaxllm.data.tokenize``; a mistake exits with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxllm.data.tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="OUT_DIR", help="where the shards go")
    add("paths", metavar="PATH", nargs="+", help="a text, JSON or parquet file, or a folder")
    add("--tokenizer", default="gpt2", help="gpt2, bytes, a tokenizer.json, or a .bin of llm.c's")
    add("--end-of-text", metavar="NAME", help="the token before each document; default: found")
    add("--key", default="text", help="the field or column that holds the text; a.b: b in a")
    add("--format", choices=documents.FORMATS, help="of every file; default: by name and contents")
    add("--skip-bad", type=int, default=0, metavar="N", help="skip so many bad documents")
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
    print(f"{options.folder}: {progress}")


if __name__ == "__main__":
    main()
