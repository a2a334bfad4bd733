"""Text to token ids and back.

The one tokenizer here needs no vocabulary file: a token is a byte. To add another (tiktoken, a
``tokenizer.json``), write a function that returns a :class:`Tokenizer` with its two functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

END_OF_TEXT = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary: two functions and what a model and a data set must know of it.

    Attributes:
        name: How messages call it.
        vocab_size: The number of ids, the end-of-text id among them.
        end_of_text: The id that stands between two documents; ``encode`` never gives it.
        encode: Text, or its UTF-8 bytes, to a uint16 array of ids.
        decode: Ids, in any sequence or array of one axis, to text; never fails.
    """

    name: str
    vocab_size: int
    end_of_text: int
    encode: Callable[[str | bytes], np.ndarray]
    decode: Callable[[ArrayLike], str]


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
