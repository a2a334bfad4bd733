"""Text to token ids and back.

``BYTES`` needs no vocabulary: a token is a byte. :func:`from_file` reads a ``tokenizer.json``, as
checkpoints have it, and :func:`gpt2` has GPT-2's vocabulary. Text is taken literally: the name of a
special token in it is encoded as the characters that it is written with.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from jaxllm.convert.llmc_header import HEADER_BYTES, read_header

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
# What tokenizer.json files call these, of GPT-2, Llama 3 and Llama 2.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")
_BEGINNINGS = ("<|begin_of_text|>", "<s>")

LLMC_MAGIC, LLMC_VERSION = 20240328, 2
# How GPT-2 cuts text before it merges: contractions, words, numbers, signs, and space.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary: two functions and what a model and a data set must know of it.

    Attributes:
        name: How messages call it.
        vocab_size: One more than the largest id, that of the special tokens among them.
        end_of_text: The id that stands between two documents; ``encode`` never gives it.
        encode: Text, or its UTF-8 bytes, to an array of ids: uint16 where that holds all ids of the
            vocabulary, else uint32.
        decode: Ids, in any sequence or array of one axis, to text; never fails. An id that is none
            becomes U+FFFD.
        begin_of_text: The id that the model expects before a text, which ``encode`` leaves to the
            caller; None where there is no such id.
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str | bytes], np.ndarray]
    decode: Callable[[ArrayLike], str]
    begin_of_text: int | None = None


def _encode_bytes(text: str | bytes) -> np.ndarray:
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.uint16)


def _decode_bytes(ids: ArrayLike) -> str:
    # 0xff is in no UTF-8 text, so an id that is no byte becomes U+FFFD, as every broken byte does.
    names = {256: END_OF_TEXT.encode()}
    ids = np.asarray(ids).ravel().tolist()
    data = (bytes([i]) if 0 <= i < 256 else names.get(i, b"\xff") for i in ids)
    return b"".join(data).decode("utf-8", errors="replace")


BYTES = Tokenizer(
    name="bytes", vocab_size=257, end_of_text=256, encode=_encode_bytes, decode=_decode_bytes
)


def load(name: str) -> Tokenizer:
    """A tokenizer by its name.

    Args:
        name: ``"bytes"``, ``"gpt2"``, a ``tokenizer.json`` or the folder it is in, or a ``.bin`` of
            llm.c's.

    Raises:
        ImportError: A package is not installed.
        FileNotFoundError: There is no such file.
        ValueError: The file holds no tokenizer.
    """
    if name == "bytes":
        return BYTES
    if name == "gpt2":
        return gpt2()
    return from_llmc(name) if name.endswith(".bin") else from_file(name)


def from_file(path: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``.

    Args:
        path: The file, or the checkpoint folder that it is in.
        end_of_text: The name of the token between two documents; None to look for those of GPT-2,
            Llama 3 and Llama 2.

    Raises:
        ImportError: The package ``tokenizers`` is not installed.
        FileNotFoundError: There is no such file.
        ValueError: The file holds no tokenizer, or there is no such end-of-text token.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'a tokenizer.json needs the package tokenizers: pip install "jaxllm[convert]"'
        ) from error
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: no tokenizer: {error}") from error
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    vocabulary = inner.get_vocab(with_added_tokens=True)
    ends = _ENDS if end_of_text is None else (end_of_text,)
    end = next((vocabulary[name] for name in ends if name in vocabulary), None)
    if end is None:
        raise ValueError(
            f"{path}: end_of_text is {end_of_text!r}, and the vocabulary has no {' or '.join(ends)}"
        )
    ids = set(vocabulary.values())
    size = max(ids) + 1

    def encode(text: str | bytes) -> np.ndarray:
        return _id_array(inner.encode(_as_text(text), add_special_tokens=False).ids, size)

    def decode(tokens: ArrayLike) -> str:
        runs = itertools.groupby(np.asarray(tokens).ravel().tolist(), ids.__contains__)
        return "".join(
            inner.decode(list(run), skip_special_tokens=False) if known else "\ufffd" * len([*run])
            for known, run in runs
        )

    begin = next((vocabulary[name] for name in _BEGINNINGS if name in vocabulary), None)
    return Tokenizer(str(path), size, end, encode, decode, begin)


def gpt2() -> Tokenizer:
    """GPT-2's tokenizer, from ``tiktoken``, which downloads the vocabulary when it is first used.

    Raises:
        ImportError: The package ``tiktoken`` is not installed.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            'GPT-2\'s tokenizer needs the package tiktoken: pip install "jaxllm[convert]"'
        ) from error
    return from_tiktoken(tiktoken.get_encoding("gpt2"))


def from_tiktoken(encoding: tiktoken.Encoding) -> Tokenizer:
    """The tokenizer of an encoding of ``tiktoken`` that has an end-of-text token.

    Args:
        encoding: Such as ``tiktoken.get_encoding("gpt2")``.
    """

    def encode(text: str | bytes) -> np.ndarray:
        return _id_array(encoding.encode_ordinary(_as_text(text)), encoding.n_vocab)

    def bytes_of(token: int) -> bytes:
        try:
            return encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return b"\xff"  # as in _decode_bytes

    def decode(tokens: ArrayLike) -> str:
        data = map(bytes_of, np.asarray(tokens).ravel().tolist())
        return b"".join(data).decode("utf-8", errors="replace")

    return Tokenizer(encoding.name, encoding.n_vocab, encoding.eot_token, encode, decode)


def from_llmc(path: str | Path) -> Tokenizer:
    """GPT-2's tokenizer from the file in which llm.c has its vocabulary; nothing is downloaded.

    The file has the bytes of each token. As a byte-pair encoding merges the pair of the lowest id
    first, that is enough to encode as well, through ``tiktoken``.

    Args:
        path: The file, such as ``gpt2_tokenizer.bin``.

    Raises:
        ImportError: The package ``tiktoken`` is not installed.
        FileNotFoundError: There is no such file.
        ValueError: It is no tokenizer of llm.c, or its tokens do not fill it.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            'a tokenizer of llm.c needs the package tiktoken: pip install "jaxllm[convert]"'
        ) from error
    path = Path(path)
    header = read_header(path, "a tokenizer", {LLMC_MAGIC: [LLMC_VERSION]})
    count, end = header[2:4].tolist()
    raw, tokens, start = path.read_bytes(), [], HEADER_BYTES
    for i in range(count):
        length = raw[start] if start < len(raw) else 0
        tokens.append(raw[start + 1 : start + 1 + length])
        start += 1 + length
        if not length or start > len(raw):
            raise ValueError(
                f"{path}: {len(raw)} bytes long; its header announces {count} tokens, and number "
                f"{i} is empty or goes beyond the end"
            )
    if start != len(raw):
        raise ValueError(f"{path}: {len(raw)} bytes long; its {count} tokens end at byte {start}")
    if not 0 <= end < count:
        raise ValueError(f"{path}: end-of-text is {end}; there are {count} tokens")
    ranks = {token: i for i, token in enumerate(tokens) if i != end}
    if missing := {bytes([i]) for i in range(256)} - ranks.keys():
        raise ValueError(f"{path}: no token for {min(missing)!r}; each byte must have one")
    encoding = tiktoken.Encoding(
        path.name,
        pat_str=GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end},
    )
    return from_tiktoken(encoding)


def _as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8", errors="replace")


def _id_array(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    return np.array(ids, np.uint16 if vocab_size <= 2**16 else np.uint32)
