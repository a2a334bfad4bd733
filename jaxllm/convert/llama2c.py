"""Llama to and from the ``.bin`` files of llama2.c and KuiperLLama, in float32 or int8.

A file is a header of int32 words and then arrays one after another, all little-endian. Weights are
(out, in)::

    header   width, width in the MLP, layers, heads, key heads, vocabulary (negative: the head is an
             array of its own), longest sequence T; in int8 also the group size
    float32  token table; norms before attention; wq; wk; wv; wo; norms before the MLP; w1 (gate);
             w2 (down); w3 (up), each of all layers; last norm; cosines and sines, (T, half a head);
             head, if it is its own
    int8     wq; wk; wv; wo; w1; w2; w3, each of all layers; head, if it is its own: of each matrix
             the numbers, int8, and then a float32 scale for each group along the input;
             token table; norms before attention; norms before the MLP; last norm, in float32

This is llama2.c's version 0, and what KuiperLLama makes of it. The programs that read the files
compute cosines and sines anew: they are written here, and not read, and may differ from another
program's in their last bits.

**Rotary pairs.** Llama 2's weights turn columns 2i and 2i + 1 of a head together, ours i and half a
head further on. Reading and writing reorder the rows of wq and wk, and in int8 their scales with
them: no number changes, and what is read and written again is the same. A file that KuiperLLama
made of a Hugging Face checkpoint, as those of Llama 3 are, has Hugging Face's order, which is ours:
``interleaved=False``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm import ops
from jaxllm.convert.huggingface_formats import format_of
from jaxllm.convert.places import Place, arrays_of, assemble, check, flatten, unflatten
from jaxllm.core.backend import use_backend
from jaxllm.data.files import replacing
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import llama3
from jaxllm.models.blocks import Params
from jaxllm.models.llama3 import Llama3Config

# The arrays in the order of the file, by Hugging Face's names.
_QUERY, _KEY = "self_attn.q_proj", "self_attn.k_proj"
_ATTENTION = (_QUERY, _KEY, "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.down_proj", "mlp.up_proj")
_NORM1, _NORM2, _LAST_NORM = "input_layernorm", "post_attention_layernorm", "model.norm"
_TABLE, _HEAD = "model.embed_tokens", "lm_head"
_COS, _SIN = "rotary cosines", "rotary sines"
_FLOAT32 = (_TABLE, _NORM1, *_ATTENTION, _NORM2, *_MLP, _LAST_NORM, _COS, _SIN, _HEAD)
_MATRICES = (*_ATTENTION, *_MLP, _HEAD)
_INT8 = (*_MATRICES, _TABLE, _NORM1, _NORM2, _LAST_NORM)

_HEADER_WORDS = 7  # and one more in int8
_LATER_VERSIONS = 0x616B3432  # what llama2.c's other versions begin with


def load(
    path: str | Path,
    *,
    rope_theta: float = 10_000.0,
    rope_scaling: ops.RopeScaling | None = None,
    norm_eps: float = 1e-5,
    interleaved: bool = True,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Params, Llama3Config]:
    """Reads a model; the size of the file tells whether it is float32 or int8.

    Header and size are checked before anything is read. The file is mapped into memory, and read
    into one of our arrays at a time. Numbers and scales in int8 are taken as they are.

    Args:
        path: The file.
        rope_theta: The base of the rotary frequencies, which is not in the file: 10,000 in Llama 2,
            500,000 in Llama 3.
        rope_scaling: How they are stretched; not in the file either.
        norm_eps: Added to the mean square in each norm; likewise.
        interleaved: Whether wq and wk turn neighbouring columns together, as llama2.c's do; False
            for a file that KuiperLLama made of a Hugging Face checkpoint.
        dtype: The dtype of our arrays, but for numbers in int8 and their scales in float32.

    Returns:
        ``(params, config)``. Parameters from an int8 file are as
        :func:`jaxllm.inference.quantize.quantize_params` makes them, except that without a head of
        its own the float token table is the head.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The header is not one of a model, or the file is shorter or longer than the
            header asks for.

    Source: ``export.py`` of llama2.c and of KuiperLLama.

    Example:
        >>> params, config = llama2c.load("stories15M.bin")
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    words = [int(word) for word in np.fromfile(path, "<i4", _HEADER_WORDS + 1)]
    try:
        config = _config_of(words, path.stat().st_size)
        config = dataclasses.replace(
            config, rope_theta=rope_theta, rope_scaling=rope_scaling, norm_eps=norm_eps
        )
        group_size = _group_size_of(words, path.stat().st_size, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

    ours = _our_arrays(config, group_size, dtype)
    parts = {part.name: part for part in _parts(config, group_size, ours)}
    stored, tensors = np.memmap(path, np.uint8, "r"), {}
    offset = _header_bytes(group_size)
    for name, part in parts.items():
        tensors[name] = np.ndarray(part.shape, part.dtype, stored, offset)
        offset += tensors[name].nbytes

    def read(name: str) -> np.ndarray:
        heads = parts[name].heads
        return _halves_apart(tensors[name], heads) if interleaved and heads else tensors[name]

    arrays: dict[str, Any] = {}
    for name, array in ours.items():
        places = {p.name: p.place for p in parts.values() if p.place and p.place.path == name}
        arrays |= flatten(assemble(read, places, {name: array.shape}, array.dtype))
    return unflatten(arrays), config


def save(
    path: str | Path, params: Params, config: Llama3Config, *, interleaved: bool = True
) -> None:
    """Writes a model that :func:`load`, llama2.c (float32 alone) and KuiperLLama read.

    The file appears only once it is complete. Of ``config`` it does not hold ``rope_theta``,
    ``rope_scaling`` and ``norm_eps``: they are to be given to :func:`load` again.

    Args:
        path: The file; overwritten.
        params: As :func:`jaxllm.models.llama3.init` makes them, in any floating dtype, the blocks
            stacked or in a list; or their int8 form, whose head is its own array in the file
            wherever it is one here.
        config: The shape of the model; the padding of the vocabulary is dropped.
        interleaved: As in :func:`load`.

    Raises:
        ValueError: ``params`` has not the arrays, the shapes or the dtypes that ``config`` asks
            for.
    """
    path, arrays = Path(path), arrays_of(params)
    group_size = None
    if (scales := arrays.get("blocks/attention/qkv/weight_scales")) is not None:
        group_size = config.width // max(scales.shape[-1], 1)
        config = dataclasses.replace(config, tied_head="head/weight_q" not in arrays)
    ours = _our_arrays(config, group_size, jnp.float32)
    check(*({name: array.shape for name, array in tree.items()} for tree in (arrays, ours)))
    for name, array in arrays.items():
        wanted = jnp.int8 if ours[name].dtype == jnp.int8 else jnp.floating
        if not jnp.issubdtype(array.dtype, wanted):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {wanted.__name__}")

    tables = ops.rope_table(
        jnp.arange(config.max_seq_len),
        config.head_width,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
    )
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(np.array(_header(config, group_size), "<i4").tobytes())
        for part in _parts(config, group_size, ours):
            if part.place is None:
                array = np.asarray(tables[part.name == _SIN], part.dtype)
            else:
                array = part.place.copy(arrays[part.place.path], part.dtype)
            if interleaved and part.heads:
                array = _pairs_together(array, part.heads)
            file.write(array.tobytes())


# The header.


def _header(config: Llama3Config, group_size: int | None) -> list[int]:
    words = [config.width, config.mlp_width, config.layers, config.heads, config.kv_heads]
    words += [config.vocab_size if config.tied_head else -config.vocab_size, config.max_seq_len]
    return words if group_size is None else [*words, group_size]


def _header_bytes(group_size: int | None) -> int:
    return 4 * (_HEADER_WORDS + (group_size is not None))


def _config_of(words: list[int], file_bytes: int) -> Llama3Config:
    """The config that a header describes.

    Raises:
        ValueError: It describes none.
    """
    if len(words) < _HEADER_WORDS:
        raise ValueError(f"has {file_bytes} bytes; the header alone has {_header_bytes(None)}")
    if words[0] == _LATER_VERSIONS:
        raise ValueError(f"is of version {words[1]} of llama2.c's export; it must be of version 0")
    width, mlp_width, layers, heads, kv_heads, vocab_size, max_seq_len = words[:_HEADER_WORDS]
    return Llama3Config(
        vocab_size=abs(vocab_size),
        max_seq_len=max_seq_len,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        mlp_width=mlp_width,
        tied_head=vocab_size > 0,
    )


def _group_size_of(words: list[int], file_bytes: int, config: Llama3Config) -> int | None:
    """The group size of an int8 file, None of a float32 file.

    Raises:
        ValueError: The file has another size than either.
    """
    wanted = _file_bytes(config, None)
    if file_bytes == wanted:
        return None
    found = f"has {file_bytes} bytes; its header asks for {wanted} in float32"
    group_size = words[_HEADER_WORDS] if len(words) > _HEADER_WORDS else 0
    if group_size < 1 or config.width % group_size or config.mlp_width % group_size:
        raise ValueError(
            f"{found}, and has no group size for int8: {group_size} is not a divisor of width "
            f"{config.width} and mlp_width {config.mlp_width}"
        )
    wanted = _file_bytes(config, group_size)
    if file_bytes != wanted:
        raise ValueError(f"{found}, or for {wanted} in int8 with groups of {group_size}")
    return group_size


def _file_bytes(config: Llama3Config, group_size: int | None) -> int:
    """The size of a file, from the header alone: a wrong one may tell of more than memory holds."""
    D, table = config.width, config.vocab_size * config.width
    matrices = config.layers * D * (sum(config.qkv_widths) + D + 3 * config.mlp_width)
    matrices += 0 if config.tied_head else table
    others = table + (2 * config.layers + 1) * D
    if group_size is None:
        return _header_bytes(None) + 4 * (
            matrices + others + config.max_seq_len * config.head_width
        )
    return _header_bytes(group_size) + matrices + 4 * (matrices // group_size + others)


# The arrays.


class _Part(NamedTuple):
    """An array of the file.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype.
        place: Where it belongs among ours; None for the rotary tables.
        heads: The heads that its rows make, where their columns turn in pairs; else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    place: Place | None = None
    heads: int | None = None


def _parts(
    config: Llama3Config, group_size: int | None, ours: dict[str, jax.ShapeDtypeStruct]
) -> Iterator[_Part]:
    """The arrays in the order of the file."""
    places = format_of(config).places(config)
    turning = {_QUERY: config.heads, _KEY: config.kv_heads}
    for module in _FLOAT32 if group_size is None else _INT8:
        if module in (_COS, _SIN):
            yield _Part(module, (config.max_seq_len, config.head_width // 2), "<f4")
        layers = (f"model.layers.{layer}.{module}.weight" for layer in range(config.layers))
        for name in (f"{module}.weight", *layers):
            if name not in places:  # the model has one, or a layer has; or the head is tied
                continue
            place = places[name]
            is_int8 = group_size is not None and module in _MATRICES
            for kind, dtype in (("q", "|i1"), ("scales", "<f4")) if is_int8 else (("", "<f4"),):
                part = _int8_place(place, kind) if kind else place
                shape = part.shape(ours[part.path].shape)
                yield _Part(f"{name} {kind}", shape, dtype, part, turning.get(module))


def _int8_place(place: Place, kind: str) -> Place:
    """Where the numbers or scales of a matrix belong: our int8 matrices are (out, in)."""
    path = place.path if place.path.endswith("/weight") else f"{place.path}/weight"
    index = (place.index[0], place.index[-1]) if place.transposed else place.index
    return Place(f"{path}_{kind}", index)


def _our_arrays(
    config: Llama3Config, group_size: int | None, dtype: DTypeLike
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each of our arrays, by path."""

    def make() -> Params:
        params = llama3.init(jax.random.key(0), config)
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        if group_size is None:
            return params
        int8 = quantize_params(params, group_size=group_size)
        return {name: x for name, x in int8.items() if name != "head" or not config.tied_head}

    with use_backend("xla"):  # of which nothing is computed
        return flatten(jax.eval_shape(make))


def _halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Of each head rows 0, 2, 4, ..., then rows 1, 3, 5, ..."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _pairs_together(rows: np.ndarray, heads: int) -> np.ndarray:
    """The reverse of :func:`_halves_apart`."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
