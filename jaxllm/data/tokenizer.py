"""Tokenizers: text to token ids and back.

``BYTES`` needs no vocabulary: a token is a byte. :func:`from_file` reads the ``tokenizer.json`` of
a checkpoint, and :func:`gpt2` has GPT-2's vocabulary. Text is taken literally: the name of a
special token in a text is encoded as ordinary characters. Tokenizers can be pickled.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jaxllm.data.files import read_json
from jaxllm.data.llmc_header import HEADER_BYTES, read_header

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in tokenizer.json files. _ENDS are unambiguous: they win over a
# chat model's eos_token, which may end a turn. _OTHER_ENDS are used if no config names a token.
_ENDS = (END_OF_TEXT, "<|end_of_text|>")
_OTHER_ENDS = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>", "<|im_end|>")  # noqa: RUF001
_BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<｜begin▁of▁sentence｜>")  # noqa: RUF001

LLMC_MAGIC = 20240328
LLMC_VERSION = 2
# GPT-2's pre-tokenization pattern: contractions, words, numbers, punctuation and white space.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """An encoder, a decoder and the special ids of a vocabulary.

    Attributes:
        name: The name in error messages.
        vocab_size: The largest id, special tokens included, plus one.
        end_of_text: The id between two documents. ``encode`` never returns it.
        encode: Converts text, or its UTF-8 bytes, to an array of ids. The dtype is uint16 if it
            holds the whole vocabulary, else uint32.
        decode: Converts ids, a sequence or a 1D array, to text. It never fails: an unknown id
            becomes U+FFFD.
        begin_of_text: The id that the model expects before a text; None if there is no such id.
            ``encode`` does not add it.
        other_ends: More ids that end generation, such as the end of a chat model's turn.
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str | bytes], np.ndarray]
    decode: Callable[[ArrayLike], str]
    begin_of_text: int | None = None
    other_ends: tuple[int, ...] = ()

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """All ids that end generation, ``end_of_text`` first."""
        return self.end_of_text, *self.other_ends


def _encode_bytes(text: str | bytes) -> np.ndarray:
    _check_text(text)
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.uint16)


def _decode_bytes(ids: ArrayLike) -> str:
    # 0xff never occurs in UTF-8, so an unknown id becomes U+FFFD, like any invalid byte.
    names = {256: END_OF_TEXT.encode()}
    ids = np.asarray(ids).ravel().tolist()
    data = (bytes([i]) if 0 <= i < 256 else names.get(i, b"\xff") for i in ids)
    return b"".join(data).decode("utf-8", errors="replace")


BYTES = Tokenizer(
    name="bytes", vocab_size=257, end_of_text=256, encode=_encode_bytes, decode=_decode_bytes
)


def load(name: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
    """Loads a tokenizer by name.

    Args:
        name: ``"bytes"``; ``"gpt2"``; the path of a ``tokenizer.json``, or of its folder; or the
            path of llm.c's ``.bin`` file.
        end_of_text: As in :func:`from_file`. The other tokenizers have a fixed end-of-text token.

    Raises:
        ImportError: A package is not installed.
        FileNotFoundError: The file does not exist.
        TypeError: ``name`` is neither a string nor a path, or ``end_of_text`` is not a string.
        ValueError: The file is not a tokenizer, or has no such end-of-text token.
    """
    name = str(name) if isinstance(name, Path) else name
    if not isinstance(name, str):
        raise TypeError(f"the name of a tokenizer is {name!r}; it must be a string or a path")
    if name not in ("bytes", "gpt2") and not name.endswith(".bin"):
        return from_file(name, end_of_text=end_of_text)
    if end_of_text not in (None, END_OF_TEXT):
        raise ValueError(f"end_of_text is {end_of_text!r}; that of {name} is {END_OF_TEXT!r}")
    if name == "bytes":
        return BYTES
    return gpt2() if name == "gpt2" else from_llmc(name)


def file_of(name: str) -> Path | None:
    """The file with the vocabulary that :func:`load` reads; None if there is no such file."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    return path if name not in ("bytes", "gpt2") and path.is_file() else None


def from_file(path: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
    """Loads a ``tokenizer.json``.

    The end-of-text token is the first that exists of

    1. ``end_of_text``, if it is given;
    2. the special token ``<|endoftext|>`` or ``<|end_of_text|>``; if both exist, the one that the
       config files name;
    3. ``eos_token`` in ``tokenizer_config.json`` or ``special_tokens_map.json``, or
       ``eos_token_id`` in ``generation_config.json`` or ``config.json``, in the same folder;
    4. a special token with another common name, such as ``</s>``.

    Args:
        path: The file, or its checkpoint folder.
        end_of_text: The name of the token between two documents; None to detect it.

    Raises:
        ImportError: The package ``tokenizers`` is not installed.
        FileNotFoundError: The file does not exist.
        TypeError: ``end_of_text`` is not a string.
        ValueError: The file is not a tokenizer, or has no such end-of-text token.
    """
    if end_of_text is not None and not isinstance(end_of_text, str):
        raise TypeError(f"end_of_text is {end_of_text!r}; it must be the name of a token")
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
        inner = _call_rust(tokenizers.Tokenizer.from_file, str(path))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    codec = _FileCodec(inner)
    config = _read_configs(path, inner)
    end, begin = _find_end(path, inner, config, end_of_text), _find_begin(inner, config)
    others = () if end_of_text else tuple(i for i in config["ends"] if i != end)
    return Tokenizer(str(path), codec.vocab_size, end, codec.encode, codec.decode, begin, others)


class _FileCodec:
    """Encoder and decoder of a ``tokenizer.json``. Unknown ids are never passed to the package."""

    def __init__(self, inner: tokenizers.Tokenizer):
        self.inner = inner
        self.inner.encode_special_tokens = True
        self.ids = set(inner.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(self.ids, default=-1) + 1

    def __reduce__(self):
        return _FileCodec, (self.inner,)

    def encode(self, text: str | bytes) -> np.ndarray:
        encoded = _call_rust(self.inner.encode, _as_text(text), add_special_tokens=False)
        return _id_array(encoded.ids, self.vocab_size)

    def decode(self, tokens: ArrayLike) -> str:
        runs = itertools.groupby(np.asarray(tokens).ravel().tolist(), self.ids.__contains__)
        return "".join(
            self.inner.decode(list(run), skip_special_tokens=False)
            if known
            else "\ufffd" * len([*run])
            for known, run in runs
        )


_CONFIGS = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)


def _read_configs(path: Path, inner: tokenizers.Tokenizer) -> dict[str, Any]:
    """Merges the config files in the folder of a ``tokenizer.json``.

    ``eos_token`` and ``bos_token`` of the result are strings or None. ``ends`` has the ids of all
    tokens that the files name as an end.
    """
    config: dict[str, Any] = {}
    ids: list[int] = []
    for name in _CONFIGS:
        file = path.with_name(name)
        contents = read_json(file) if file.is_file() else {}
        config |= {key: value for key, value in contents.items() if value is not None}
        ids += _ids(contents.get("eos_token_id"))
    for key in ("eos_token", "bos_token"):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        config[key] = token if isinstance(token, str) else None
    if config["eos_token"] is None:
        first = next(iter(_ids(config.get("eos_token_id"))), None)
        config["eos_token"] = None if first is None else inner.id_to_token(first)
    named = inner.token_to_id(config["eos_token"] or "")
    known = [i for i in ids if inner.id_to_token(i) is not None]
    config["ends"] = tuple(dict.fromkeys(([] if named is None else [named]) + known))
    return config


def _ids(value: Any) -> list[int]:
    """The valid ids in an ``eos_token_id``, which is an id or a list of ids."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and 0 <= i < 2**32]


def _find_end(
    path: Path, inner: tokenizers.Tokenizer, config: Mapping[str, Any], name: str | None
) -> int:
    """The id of the token between two documents."""
    eos, special = config["eos_token"], _special_tokens(inner)
    names = [*([eos] if eos in _ENDS else []), *_ENDS, *([eos] if eos else []), *_OTHER_ENDS]
    known = {**special, eos: inner.token_to_id(eos)} if eos else special
    if name is not None:
        names, known = [name], {name: inner.token_to_id(name)}
    end = next((known[name] for name in names if known.get(name) is not None), None)
    if end is None:
        raise ValueError(
            f"{path}: end_of_text is {name!r}, and the vocabulary has no "
            f"{' or '.join(dict.fromkeys(names))}; pass the name of the token between documents as "
            "end_of_text (--end-of-text)"
        )
    return end


def _find_begin(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> int | None:
    """The id before a text. A ``bos_token`` alone does not mean that the model expects it."""
    if (add := config.get("add_bos_token")) is not None:
        return inner.token_to_id(config["bos_token"] or "") if add else None
    special = _special_tokens(inner)
    return next((special[name] for name in _BEGINNINGS if name in special), None)


def _special_tokens(inner: tokenizers.Tokenizer) -> dict[str, int]:
    """The ids of the special tokens by name; all tokens if none is marked as special."""
    added = inner.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    return special or inner.get_vocab(with_added_tokens=True)


def gpt2() -> Tokenizer:
    """GPT-2's tokenizer from ``tiktoken``, which downloads the vocabulary on first use.

    Raises:
        ImportError: The package ``tiktoken`` is not installed.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            'GPT-2\'s tokenizer needs the package tiktoken: pip install "jaxllm[convert]"'
        ) from error
    return _from_tiktoken(tiktoken.get_encoding("gpt2"), gpt2_pattern=True)


def from_tiktoken(encoding: tiktoken.Encoding) -> Tokenizer:
    """Makes a tokenizer from a ``tiktoken`` encoding.

    Args:
        encoding: An encoding with an end-of-text token, such as ``tiktoken.get_encoding("gpt2")``.
    """
    return _from_tiktoken(encoding, gpt2_pattern=False)


def _from_tiktoken(encoding: tiktoken.Encoding, *, gpt2_pattern: bool) -> Tokenizer:
    codec = _TiktokenCodec(encoding, gpt2_pattern)
    return Tokenizer(
        encoding.name, encoding.n_vocab, encoding.eot_token, codec.encode, codec.decode
    )


# White space by tiktoken's definition. Python's \s has four more control characters.
_SPACES = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LONG = 1 << 18  # a run of this length is encoded separately; tiktoken fails at about a million
_LONG_RUN = re.compile(f"(?<!{_SPACES}){_SPACES}{{{_LONG},}}")


@dataclasses.dataclass(frozen=True)
class _TiktokenCodec:
    """Encoder and decoder of a ``tiktoken`` encoding.

    Attributes:
        encoding: The encoding.
        gpt2_pattern: Whether it uses :data:`GPT2_PATTERN`.
    """

    encoding: tiktoken.Encoding
    gpt2_pattern: bool

    def encode(self, text: str | bytes) -> np.ndarray:
        text, ids, start = _as_text(text), [], 0
        if self.gpt2_pattern and len(text) >= _LONG:
            # GPT-2's pattern makes one piece of a run, without the last space before a word.
            for run in _LONG_RUN.finditer(text):
                ids += _call_rust(self.encoding.encode_ordinary, text[start : run.start()])
                start = run.end() - (run.end() < len(text))
                ids += self.encoding._encode_single_piece(text[run.start() : start])
        ids += _call_rust(self.encoding.encode_ordinary, text[start:] if start else text)
        return _id_array(ids, self.encoding.n_vocab)

    def decode(self, tokens: ArrayLike) -> str:
        data = map(self._bytes_of, np.asarray(tokens).ravel().tolist())
        return b"".join(data).decode("utf-8", errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return b"\xff"  # as in _decode_bytes


def from_llmc(path: str | Path) -> Tokenizer:
    """Loads GPT-2's tokenizer from llm.c's vocabulary file, without a download.

    The file has the bytes of each token. Byte-pair encoding merges the pair with the lowest id
    first, so the tokens in id order define the merges.

    Args:
        path: The file, such as ``gpt2_tokenizer.bin``.

    Raises:
        ImportError: The package ``tiktoken`` is not installed.
        FileNotFoundError: The file does not exist.
        ValueError: The file is not an llm.c tokenizer, or its contents contradict its header.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            'llm.c\'s tokenizer needs the package tiktoken: pip install "jaxllm[convert]"'
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
                f"{path}: {len(raw)} bytes long; its header has {count} tokens, and number {i} is "
                "empty or goes beyond the end"
            )
    if start != len(raw):
        raise ValueError(f"{path}: {len(raw)} bytes long; its {count} tokens end at byte {start}")
    if not 0 <= end < count:
        raise ValueError(f"{path}: end-of-text is {end}; there are {count} tokens")
    ranks = {token: i for i, token in enumerate(tokens) if i != end}
    if missing := {bytes([i]) for i in range(256)} - ranks.keys():
        raise ValueError(f"{path}: no token for {min(missing)!r}; each byte must have a token")
    encoding = tiktoken.Encoding(
        path.name,
        pat_str=GPT2_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end},
    )
    return _from_tiktoken(encoding, gpt2_pattern=True)


def _call_rust(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function of a Rust package, and converts a panic to a ValueError.

    A panic is a BaseException that is not an Exception, and it cannot be pickled.

    Raises:
        ValueError: The package panicked.
    """
    try:
        return function(*args, **options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer package panicked: {error}") from None


def _as_text(text: str | bytes) -> str:
    _check_text(text)
    return text if isinstance(text, str) else bytes(text).decode("utf-8", errors="replace")


def _check_text(text: object) -> None:
    """Raises TypeError where a text is neither a string nor bytes, but for example token ids."""
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise TypeError(f"text has type {type(text).__name__}; it must be a string or bytes")


def _id_array(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    return np.array(ids, np.uint16 if vocab_size <= 2**16 else np.uint32)
