"""Converts Llama to and from the ``.bin`` files of llama2.c and KuiperLLama, in float32 or int8.

A file is a header of int32 words, followed by arrays, all little-endian. Weights are (out, in)::

    header   D, F, layers, heads, kv heads, vocabulary size (negative if the LM head is not tied),
             longest sequence T; for int8 also the group size
    float32  token table; norms before attention; wq; wk; wv; wo; norms before the MLP; w1 (gate);
             w2 (down); w3 (up), each for all layers; last norm; RoPE cosines and sines, (T, H / 2);
             LM head, if it is not tied
    int8     wq; wk; wv; wo; w1; w2; w3, each for all layers; LM head, if it is not tied. Each
             matrix is its int8 elements, and then a float32 scale for each group along the input.
             Then in float32: token table; norms before attention; norms before the MLP; last norm

This is version 0 of llama2.c's export, and KuiperLLama's variant of it. RoPE tables are written but
not read: every program recomputes them. They may differ from another program's in the last bits.

**RoPE pairs.** llama2.c rotates columns 2i and 2i + 1 of a head as a pair; jaxllm rotates columns i
and i + H / 2. :func:`load` and :func:`save` reorder the rows of wq and wk, and their int8 scales.
No element changes, so a file that is read and written again is identical. A file that KuiperLLama
made from a Hugging Face checkpoint, such as Llama 3, has jaxllm's order: ``interleaved=False``.
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
from jaxllm.convert.parameter_mapping import (
    ParamSlice,
    assemble,
    check_dtype,
    check_shapes,
    flatten,
    stacked_arrays,
    unflatten,
)
from jaxllm.core.backend import use_backend
from jaxllm.data.files import replacing
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import llama3
from jaxllm.models.common import Params, check_config_type
from jaxllm.models.llama3 import Llama3Config
from jaxllm.ops.checks import as_bool

# The arrays in file order, by Hugging Face's names.
_QUERY, _KEY, _VALUE = (f"self_attn.{name}_proj" for name in "qkv")
_ATTENTION = (_QUERY, _KEY, _VALUE, "self_attn.o_proj")
_GATE, _UP = "mlp.gate_proj", "mlp.up_proj"
_MLP = (_GATE, "mlp.down_proj", _UP)
_NORM1, _NORM2, _LAST_NORM = "input_layernorm", "post_attention_layernorm", "model.norm"
_TABLE, _LM_HEAD = "model.embed_tokens", "lm_head"
_COS, _SIN = "rotary cosines", "rotary sines"
_FLOAT32 = (_TABLE, _NORM1, *_ATTENTION, _NORM2, *_MLP, _LAST_NORM, _COS, _SIN, _LM_HEAD)
_MATRICES = (*_ATTENTION, *_MLP, _LM_HEAD)
_INT8 = (*_MATRICES, _TABLE, _NORM1, _NORM2, _LAST_NORM)

_HEADER_WORDS = 7  # and one more in int8
_LATER_VERSIONS = 0x616B3432  # the magic number of llama2.c's other versions


def load(
    path: str | Path,
    *,
    rope_theta: float = 10_000.0,
    rope_scaling: ops.RopeScaling | None = None,
    norm_eps: float = 1e-5,
    interleaved: bool = True,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Params, Llama3Config]:
    """Reads a model in float32 or int8, which the size of the file tells.

    Header and size are checked first. The file is memory-mapped and copied one parameter at a time.
    int8 elements and their scales are kept as they are.

    Args:
        path: The file.
        rope_theta: The base of the RoPE frequencies, which is not in the file: 10,000 for Llama 2,
            500,000 for Llama 3.
        rope_scaling: The scaling of the RoPE frequencies, which is not in the file.
        norm_eps: Added to the mean square in each norm; not in the file.
        interleaved: Whether wq and wk rotate adjacent columns, as in llama2.c. False for a file
            that KuiperLLama made from a Hugging Face checkpoint.
        dtype: The dtype of the parameters, except for int8 elements and their float32 scales.

    Returns:
        ``(params, config)``. Parameters from an int8 file have the form of
        :func:`jaxllm.inference.quantize.quantize_params`, except that a tied LM head stays the
        floating-point token table.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``interleaved`` is not a bool, ``rope_scaling`` no ``RopeScaling``,
            ``rope_theta`` or ``norm_eps`` no number, or ``dtype`` is not a floating dtype or needs
            ``jax_enable_x64``.
        ValueError: The header is invalid, or the size of the file contradicts it; or ``rope_theta``
            or ``norm_eps`` is not above 0 and finite.

    Source: ``export.py`` of llama2.c and of KuiperLLama.

    Example:
        >>> params, config = llama2c.load("stories15M.bin")
    """
    path, dtype = Path(path), check_dtype(dtype)
    interleaved = as_bool("interleaved", interleaved)
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

    wanted = _param_structs(config, group_size, dtype)
    parts = {part.name: part for part in _parts(config, group_size, wanted)}
    stored, tensors = np.memmap(path, np.uint8, "r"), {}
    offset = _header_bytes(group_size)
    for name, part in parts.items():
        tensors[name] = np.ndarray(part.shape, part.dtype, stored, offset)
        offset += tensors[name].nbytes

    def read(name: str) -> np.ndarray:
        heads = parts[name].heads
        return _split_pairs(tensors[name], heads) if interleaved and heads else tensors[name]

    arrays: dict[str, Any] = {}
    for path, array in wanted.items():
        mapping = {p.name: p.target for p in parts.values() if p.target and p.target.path == path}
        arrays |= flatten(assemble(read, mapping, {path: array.shape}, array.dtype))
    return unflatten(arrays), config


def save(
    path: str | Path, params: Params, config: Llama3Config, *, interleaved: bool = True
) -> None:
    """Writes a model that :func:`load`, llama2.c (float32 only) and KuiperLLama read.

    The file is written atomically. It does not hold ``rope_theta``, ``rope_scaling`` and
    ``norm_eps`` of the config: pass them to :func:`load` again.

    Args:
        path: The file; overwritten.
        params: The parameters in any floating dtype, the blocks stacked or in a list. Or their int8
            form; its LM head is written as a separate array if ``params`` has one.
        config: The config of the model. The padding of the vocabulary is dropped.
        interleaved: As in :func:`load`.

    Raises:
        TypeError: ``interleaved`` is not a bool, or ``config`` no ``Llama3Config``.
        ValueError: Names, shapes or dtypes of the parameters differ from the config; or the format
            lacks an option that the config has (``head_dim``, ``qkv_bias``, ``qk_norm``,
            ``window``).
    """
    check_config_type(config, Llama3Config)
    _check_options(config)
    interleaved = as_bool("interleaved", interleaved)
    path, arrays = Path(path), stacked_arrays(params)
    group_size = None
    if (scales := arrays.get("blocks/attention/qkv/weight/scales")) is not None:
        group_size = config.width // max(scales.shape[-1], 1)
        config = dataclasses.replace(config, tied_head="lm_head/q" not in arrays)
    wanted = _param_structs(config, group_size, jnp.float32)
    check_shapes(*({name: x.shape for name, x in tree.items()} for tree in (arrays, wanted)))
    for name, array in arrays.items():
        kind = jnp.int8 if wanted[name].dtype == jnp.int8 else jnp.floating
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {kind.__name__}")

    tables = ops.rope_table(
        jnp.arange(config.max_seq_len),
        config.head_width,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
    )
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(np.array(_header(config, group_size), "<i4").tobytes())
        for part in _parts(config, group_size, wanted):
            if part.target is None:
                array = np.asarray(tables[part.name == _SIN], part.dtype)
            else:
                array = part.target.copy(arrays[part.target.path], part.dtype)
            if interleaved and part.heads:
                array = _interleave_pairs(array, part.heads)
            file.write(array.tobytes())


# The header.


def _check_options(config: Llama3Config) -> None:
    """Raises ValueError with the name of an option that the format lacks."""
    if config.head_width * config.heads != config.width:
        raise ValueError(f"head_dim is {config.head_dim}; the format has width / heads alone")
    for name in ("qkv_bias", "qk_norm", "window"):
        if value := getattr(config, name):
            raise ValueError(f"{name} is {value}; the format has no key for it")


def _header(config: Llama3Config, group_size: int | None) -> list[int]:
    words = [config.width, config.mlp_width, config.layers, config.heads, config.kv_heads]
    words += [config.vocab_size if config.tied_head else -config.vocab_size, config.max_seq_len]
    return words if group_size is None else [*words, group_size]


def _header_bytes(group_size: int | None) -> int:
    return 4 * (_HEADER_WORDS + (group_size is not None))


def _config_of(words: list[int], file_bytes: int) -> Llama3Config:
    """The config in a header.

    Raises:
        ValueError: The header is invalid.
    """
    if len(words) < _HEADER_WORDS:
        raise ValueError(f"has {file_bytes} bytes; the header alone has {_header_bytes(None)}")
    if words[0] == _LATER_VERSIONS:
        raise ValueError(f"has version {words[1]} of llama2.c's export; it must have version 0")
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
    """The group size of an int8 file; None for a float32 file.

    Raises:
        ValueError: The size of the file fits neither.
    """
    wanted = _file_bytes(config, None)
    if file_bytes == wanted:
        return None
    found = f"has {file_bytes} bytes; by its header it must have {wanted} in float32"
    group_size = words[_HEADER_WORDS] if len(words) > _HEADER_WORDS else 0
    if group_size < 1 or config.width % group_size or config.mlp_width % group_size:
        raise ValueError(
            f"{found}, and it has no group size for int8: {group_size} is not a divisor of width "
            f"{config.width} and mlp_width {config.mlp_width}"
        )
    wanted = _file_bytes(config, group_size)
    if file_bytes != wanted:
        raise ValueError(f"{found}, or {wanted} in int8 with groups of {group_size}")
    return group_size


def _file_bytes(config: Llama3Config, group_size: int | None) -> int:
    """The size of a file, computed without arrays: a wrong header may exceed memory."""
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
        target: Its parameter slice; None for the RoPE tables.
        heads: The number of heads in the rows of wq and wk, whose columns are RoPE pairs; None for
            the other arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    target: ParamSlice | None = None
    heads: int | None = None


def _parts(
    config: Llama3Config, group_size: int | None, params: dict[str, jax.ShapeDtypeStruct]
) -> Iterator[_Part]:
    """The arrays in file order."""
    mapping = format_of(config).mapping(config)
    rope_heads = {_QUERY: config.heads, _KEY: config.kv_heads}
    for module in _FLOAT32 if group_size is None else _INT8:
        if module in (_COS, _SIN):
            yield _Part(module, (config.max_seq_len, config.head_width // 2), "<f4")
        layers = (f"model.layers.{layer}.{module}.weight" for layer in range(config.layers))
        for name in (f"{module}.weight", *layers):
            if name not in mapping:  # a module has either form of name; a tied LM head has none
                continue
            target = mapping[name]
            is_int8 = group_size is not None and module in _MATRICES
            for kind, dtype in (("q", "|i1"), ("scales", "<f4")) if is_int8 else (("", "<f4"),):
                part = _int8_slice(target, kind, _int8_rows(config, module)) if kind else target
                shape = part.shape(params[part.path].shape)
                yield _Part(f"{name} {kind}", shape, dtype, part, rope_heads.get(module))


def _int8_slice(target: ParamSlice, kind: str, rows: slice) -> ParamSlice:
    """The slice of a matrix's int8 elements or scales. Int8 matrices are (out, in) in jaxllm."""
    index = (target.index[0], rows) if target.transposed else target.index
    return ParamSlice(f"{target.path}/{kind}", index)


def _int8_rows(config: Llama3Config, module: str) -> slice:
    """The rows of a module in an int8 matrix: queries, keys and values; gate and up."""
    (q, k, v), F = config.qkv_widths, config.mlp_width
    rows = {_QUERY: (0, q), _KEY: (q, q + k), _VALUE: (q + k, q + k + v)}
    rows |= {_GATE: (0, F), _UP: (F, 2 * F)}
    return slice(*rows.get(module, (None, None)))


def _param_structs(
    config: Llama3Config, group_size: int | None, dtype: DTypeLike
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter, by path."""

    def make() -> Params:
        params = llama3.init(jax.random.key(0), config)
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        if group_size is None:
            return params
        int8 = quantize_params(params, group_size=group_size)
        return {name: x for name, x in int8.items() if name != "lm_head" or not config.tied_head}

    with use_backend("xla"):  # any backend: only shapes are evaluated
        return flatten(jax.eval_shape(make))


def _split_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of each head: 0, 2, 4, ..., then 1, 3, 5, ..."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _interleave_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of :func:`_split_pairs`."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
