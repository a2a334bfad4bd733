"""The file format of token shards, which is llm.c's.

There are two kinds, both little-endian. The magic number distinguishes them::

    256 x int32     20240520, 1, token count, zeros      GPT-2's:   count x uint16
    256 x int32     20240801, 7, token count, zeros      Llama 3's: count x uint32
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxllm.data.files import replacing
from jaxllm.data.llmc_header import HEADER_BYTES, check_size, header_of, read_header


class Kind(NamedTuple):
    """The magic number, version, dtype and largest token id of a kind of shard."""

    magic: int
    version: int
    dtype: np.dtype
    largest: int


KINDS = {
    "gpt2": Kind(20240520, 1, np.dtype("<u2"), 2**16 - 1),
    # Batches are int32, in which a larger id would be negative: an ignored label.
    "llama3": Kind(20240801, 7, np.dtype("<u4"), 2**31 - 1),
}


def write_shard(
    path: str | Path, tokens: ArrayLike, *, kind: Literal["gpt2", "llama3"] = "gpt2"
) -> None:
    """Writes one shard; the file appears only once it is complete.

    Args:
        path: The file; overwritten.
        tokens: Token ids of an integer dtype, one axis, fewer than 2**31.
        kind: ``"gpt2"`` stores ids 0 to 65535 as uint16. ``"llama3"`` stores ids 0 to 2**31 - 1 as
            uint32.

    Raises:
        TypeError: ``tokens`` has no integer dtype.
        ValueError: The kind is unknown, a token is out of range, there are too many tokens, or
            ``tokens`` has more than one axis.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    magic, version, dtype, most = KINDS[kind]
    tokens = np.asarray(tokens)
    if tokens.size and not np.issubdtype(tokens.dtype, np.integer):  # an empty list is float64
        raise TypeError(f"tokens has dtype {tokens.dtype}; it must be an integer array")
    if tokens.ndim != 1:
        raise ValueError(f"tokens has shape {tokens.shape}; it must have one axis")
    if tokens.size >= 2**31:
        raise ValueError(f"tokens has {tokens.size} entries; a shard holds fewer than 2**31")
    if tokens.size and (tokens.min() < 0 or tokens.max() > most):
        raise ValueError(
            f"tokens spans {tokens.min()} to {tokens.max()}; a shard of kind {kind} holds ids 0 to "
            f"{most}"
        )
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header_of(magic, version, tokens.size))
        tokens.astype(dtype).tofile(file)


def read_shard(path: str | Path) -> np.memmap:
    """Memory-maps the tokens of one shard, read-only.

    Args:
        path: The file, of either kind.

    Returns:
        The tokens, uint16 or uint32, one axis.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a token shard, or its size contradicts its header.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such shard")
    versions = {kind.magic: [kind.version] for kind in KINDS.values()}
    magic, _, count = read_header(path, "a token shard", versions)[:3].tolist()
    (dtype,) = (kind.dtype for kind in KINDS.values() if kind.magic == magic)
    check_size(path, HEADER_BYTES + count * dtype.itemsize, f"{count} tokens")
    return np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(count,))
