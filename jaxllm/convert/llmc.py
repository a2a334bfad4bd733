"""Converts GPT-2 to and from llm.c's files: checkpoints, debug states and optimizer states.

A file is a header of 256 int32 words, followed by arrays, all little-endian. Parameters, gradients
and moments have the order of :data:`TENSORS`. Each tensor holds all layers. Weights are
``(out, in)``; jaxllm's are ``(in, out)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.convert.parameter_mapping import (
    check_dtype,
    check_shapes,
    flatten,
    stacked_arrays,
    unflatten,
)
from jaxllm.data.files import replacing
from jaxllm.data.llmc_header import HEADER_BYTES, check_size, header_of, read_header
from jaxllm.models import gpt2
from jaxllm.models.common import Params, check_config_type
from jaxllm.models.gpt2 import GPT2Config
from jaxllm.ops.checks import as_integer, check_floating

CHECKPOINT_MAGIC = 20240326
DEBUG_STATE_MAGIC = 20240327
DEBUG_STATE_VERSION = 2
OPTIMIZER_STATE_MAGIC = 20240527
OPTIMIZER_STATE_VERSION = 1
# The dtypes of a checkpoint by version.
DTYPES = {3: jnp.dtype("float32"), 5: jnp.dtype("bfloat16")}

# The parameter paths of the tensors, in file order. Tensors that end in "/weight" are transposed.
TENSORS = (
    "wte",
    "wpe",
    "blocks/ln1/scale",
    "blocks/ln1/bias",
    "blocks/attention/qkv/weight",
    "blocks/attention/qkv/bias",
    "blocks/attention/out/weight",
    "blocks/attention/out/bias",
    "blocks/ln2/scale",
    "blocks/ln2/bias",
    "blocks/mlp/up/weight",
    "blocks/mlp/up/bias",
    "blocks/mlp/down/weight",
    "blocks/mlp/down/bias",
    "ln_f/scale",
    "ln_f/bias",
)


def load_gpt2(path: str | Path, *, dtype: DTypeLike | None = None) -> tuple[Params, GPT2Config]:
    """Reads a checkpoint of version 3 (float32) or 5 (bfloat16).

    Args:
        path: The file.
        dtype: The dtype of the parameters; None for the file's dtype.

    Returns:
        ``(params, config)``. The padding rows of the token table are read from the file.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``dtype`` is not a floating dtype, or needs ``jax_enable_x64``.
        ValueError: The file is not a checkpoint; its vocabulary is not padded to a multiple of 128;
            or its size contradicts its header.
    """
    path, dtype = Path(path), None if dtype is None else check_dtype(dtype)
    header = read_header(path, "a GPT-2 checkpoint", {CHECKPOINT_MAGIC: tuple(DTYPES)})
    version, max_seq_len, vocab_size, layers, heads, width, padded = header[1:8].tolist()
    try:
        config = GPT2Config(vocab_size, max_seq_len, layers, heads, width)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if padded != config.padded_vocab_size:
        raise ValueError(
            f"{path}: the vocabulary of {vocab_size} is padded to {padded}; it must be padded to "
            f"{config.padded_vocab_size}"
        )
    stored = DTYPES[version]
    count = gpt2.num_params(config)
    check_size(path, HEADER_BYTES + count * stored.itemsize, f"{count} parameters of {stored}")
    elements = np.memmap(path, stored, "r", offset=HEADER_BYTES)
    return _params_from(elements, config, stored if dtype is None else dtype), config


def save_gpt2(
    path: str | Path, params: Params, config: GPT2Config, *, dtype: DTypeLike | None = None
) -> None:
    """Writes a checkpoint atomically.

    A file that is read by :func:`load_gpt2` without a ``dtype`` and written again is identical.

    Args:
        path: The file; overwritten.
        params: The parameters, the blocks stacked or in a list.
        config: The config of the model.
        dtype: float32 for version 3, or bfloat16 for version 5; None for the dtype of ``params``,
            or float32 if they have different dtypes.

    Raises:
        TypeError: A parameter is not of a floating dtype, or ``config`` no ``GPT2Config``.
        ValueError: The dtype is neither float32 nor bfloat16, or names or shapes of the parameters
            differ from the config.
    """
    check_config_type(config, GPT2Config)
    arrays = stacked_arrays(params)
    check_shapes({name: array.shape for name, array in arrays.items()}, _shapes(config))
    check_floating(**arrays)
    dtypes = {jnp.dtype(array.dtype) for array in arrays.values()}
    if dtype is None:
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    dtype = jnp.dtype(dtype)
    versions = {of: version for version, of in DTYPES.items()}
    if dtype not in versions:
        raise ValueError(f"dtype is {dtype}; it must be {' or '.join(map(str, versions))}")
    header = header_of(
        CHECKPOINT_MAGIC,
        versions[dtype],
        config.max_seq_len,
        config.vocab_size,
        config.layers,
        config.heads,
        config.width,
        config.padded_vocab_size,
    )
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header)
        for name in TENSORS:
            _transpose_weight(name, np.asarray(arrays[name])).astype(dtype).tofile(file)


class DebugState(NamedTuple):
    """The reference values that llm.c's ``train_gpt2.py`` records for one batch.

    Attributes:
        tokens: The batch, (B, T), int32.
        labels: The tokens shifted by one, (B, T), int32.
        logits: The model's output, (B, T, V), float32, without the padding of the vocabulary.
        loss: The mean cross entropy in nats.
        gradients: The gradients of the loss by the parameters, float32.
    """

    tokens: np.ndarray
    labels: np.ndarray
    logits: np.ndarray
    loss: float
    gradients: Params


def read_debug_state(path: str | Path, config: GPT2Config) -> DebugState:
    """Reads a debug state.

    Args:
        path: The file.
        config: The config of the model, from its checkpoint.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``config`` is no ``GPT2Config``.
        ValueError: The file is not a debug state, or its size contradicts its header and the
            config.
    """
    check_config_type(config, GPT2Config)
    path = Path(path)
    header = read_header(path, "a debug state", {DEBUG_STATE_MAGIC: [DEBUG_STATE_VERSION]})
    B, T = header[2:4].tolist()
    V, count = config.vocab_size, gpt2.num_params(config)
    check_size(
        path,
        HEADER_BYTES + 4 * (2 * B * T + B * T * V + 1 + count),
        f"{B} sequences of {T} tokens, a vocabulary of {V}, and {count} gradients",
    )
    # The file has int32 and float32 words, so each part gets a view of its dtype.
    words = np.memmap(path, "<i4", "r", offset=HEADER_BYTES)
    tokens, labels, logits, loss, gradients = np.split(
        words, np.cumsum([B * T, B * T, B * T * V, 1])
    )
    return DebugState(
        tokens.reshape(B, T),
        labels.reshape(B, T),
        logits.view("<f4").reshape(B, T, V),
        float(loss.view("<f4")[0]),
        _params_from(gradients.view("<f4"), config, "float32"),
    )


class OptimizerState(NamedTuple):
    """AdamW's state, which llm.c saves with a checkpoint.

    Attributes:
        step: The number of steps taken.
        m: The first moments, float32, shaped like the parameters.
        v: The second moments, float32, shaped like the parameters.
        master: The float32 master weights; None if the file has none.
    """

    step: int
    m: Params
    v: Params
    master: Params | None


def read_optimizer_state(path: str | Path, config: GPT2Config) -> OptimizerState:
    """Reads the optimizer state of a run on one device, ``state_%08d_00000.bin``.

    Args:
        path: The file.
        config: The config of the model, from its checkpoint.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``config`` is no ``GPT2Config``.
        ValueError: The file is not an optimizer state; or it does not hold the whole state, because
            a run on several devices sharded it.
    """
    check_config_type(config, GPT2Config)
    path = Path(path)
    versions = {OPTIMIZER_STATE_MAGIC: [OPTIMIZER_STATE_VERSION]}
    header = read_header(path, "an optimizer state", versions)
    ranks, rank, has_master = header[2:5].tolist()
    count, trees = gpt2.num_params(config), 3 if has_master else 2
    check_size(
        path,
        HEADER_BYTES + 4 * trees * count,
        f"rank {rank} of {ranks} {'with' if has_master else 'without'} master weights "
        f"(only an unsharded state of {count} parameters can be read)",
    )
    parts = np.memmap(path, "<f4", "r", offset=HEADER_BYTES).reshape(trees, count)
    m, v, *master = (_params_from(part, config, "float32") for part in parts)
    return OptimizerState(int(header[10]), m, v, master[0] if master else None)


def write_optimizer_state(path: str | Path, state: OptimizerState) -> None:
    """Writes the optimizer state of a run on one device atomically.

    Args:
        path: The file; overwritten.
        state: The state, the blocks stacked or in lists.

    Raises:
        TypeError: The step is not an integer, or an array is not of a floating dtype.
        ValueError: The step is negative or exceeds int32; the names in a tree of the state are not
            GPT-2's; or its shapes differ from ``m``.
    """
    step = as_integer("step", state.step)
    if not 0 <= step < 2**31:
        raise ValueError(f"step is {step}; it must be at least 0 and below 2**31")
    words = [OPTIMIZER_STATE_MAGIC, OPTIMIZER_STATE_VERSION, 1, 0, int(state.master is not None)]
    trees = {"m": state.m, "v": state.v, "master": state.master}
    trees = {key: stacked_arrays(tree, key) for key, tree in trees.items() if tree is not None}
    wanted = {name: getattr(trees["m"].get(name), "shape", ()) for name in TENSORS}
    for key, arrays in trees.items():
        try:
            check_shapes({name: array.shape for name, array in arrays.items()}, wanted)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        check_floating(**{f"{key}/{name}": array for name, array in arrays.items()})
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header_of(*words, *[0] * 5, step))
        for arrays in trees.values():
            for name in TENSORS:
                _transpose_weight(name, np.asarray(arrays[name])).astype("<f4").tofile(file)


def _shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters by path."""
    params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), config))
    return {name: x.shape for name, x in flatten(params).items()}


def _transpose_weight(name: str, array: np.ndarray) -> np.ndarray:
    """Converts a tensor between jaxllm's and llm.c's layout, the columns as one dimension."""
    if not name.endswith("/weight"):
        return array
    return array.reshape(*array.shape[:2], -1).swapaxes(-1, -2)


def _params_from(elements: np.ndarray, config: GPT2Config, dtype: DTypeLike) -> Params:
    """The parameters from the concatenated elements of all tensors."""
    shapes = _shapes(config)
    return unflatten(
        {
            name: jnp.asarray(
                _transpose_weight(name, part).astype(dtype, order="C").reshape(shapes[name])
            )
            for name, part in _parts(elements, config)
        }
    )


def _parts(elements: np.ndarray, config: GPT2Config) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file by name, in llm.c's layout."""
    shapes, start = _shapes(config), 0
    for name in TENSORS:
        shape = shapes[name]
        if name.endswith("/weight"):
            shape = (shape[0], math.prod(shape[2:]), shape[1])
        size = math.prod(shape)
        yield name, elements[start : start + size].reshape(shape)
        start += size
