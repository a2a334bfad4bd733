"""GPT-2 in llm.c's files: checkpoints, debug states and the optimizer's state.

Every file has a header of 256 words of int32 and then arrays, little-endian. Those of the
parameters (and of gradients and moments, which are shaped alike) follow one another in the order of
:data:`TENSORS`, all layers of one beside each other, weights as ``(out, in)``; ours are
``(in, out)``.
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

from jaxllm.convert.llmc_header import HEADER_BYTES, check_size, header_of, read_header
from jaxllm.convert.places import arrays_of, check, flatten, unflatten
from jaxllm.data.files import replacing
from jaxllm.models import gpt2
from jaxllm.models.blocks import Params
from jaxllm.models.gpt2 import GPT2Config

CHECKPOINT_MAGIC = 20240326
DEBUG_STATE_MAGIC, DEBUG_STATE_VERSION = 20240327, 2
OPTIMIZER_STATE_MAGIC, OPTIMIZER_STATE_VERSION = 20240527, 1
# The dtypes of a checkpoint by its version; bfloat16 is stored as it is.
DTYPES = {3: jnp.dtype("float32"), 5: jnp.dtype("bfloat16")}

# Where the file's tensors are among our parameters, in its order; weights lie there transposed.
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
    """Reads a checkpoint, of version 3 (float32) or 5 (bfloat16).

    Args:
        path: The file.
        dtype: The dtype of our arrays; None for the file's.

    Returns:
        ``(params, config)``. The padded rows of the token table are as the file has them.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no such checkpoint, its sizes are not those of a GPT-2 with the vocabulary
            padded to a multiple of 128, or it has not the size that follows from them.
    """
    path = Path(path)
    header = read_header(path, "a GPT-2 checkpoint", {CHECKPOINT_MAGIC: tuple(DTYPES)})
    version, max_seq_len, vocab_size, layers, heads, width, padded = header[1:8].tolist()
    try:
        config = GPT2Config(vocab_size, max_seq_len, layers, heads, width)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if padded != config.padded_vocab_size:
        raise ValueError(
            f"{path}: a vocabulary of {vocab_size} padded to {padded}; it must be padded to "
            f"{config.padded_vocab_size}"
        )
    stored = DTYPES[version]
    count = gpt2.num_params(config)
    check_size(path, HEADER_BYTES + count * stored.itemsize, f"{count} parameters of {stored}")
    numbers = np.memmap(path, stored, "r", offset=HEADER_BYTES)
    return _params_from(numbers, config, dtype or stored), config


def save_gpt2(
    path: str | Path, params: Params, config: GPT2Config, *, dtype: DTypeLike | None = None
) -> None:
    """Writes a checkpoint; the file appears only once it is complete.

    What :func:`load_gpt2` read without a ``dtype`` is written as it was, byte for byte.

    Args:
        path: The file; overwritten.
        params: The parameters, stacked or a list of layers.
        config: Their shape.
        dtype: float32, for a file of version 3, or bfloat16, for one of version 5; None for that of
            ``params``.

    Raises:
        ValueError: The dtype is another, or ``params`` are not shaped as ``config`` says.
    """
    arrays = arrays_of(params)
    check({name: array.shape for name, array in arrays.items()}, _shapes(config))
    dtype = jnp.dtype(dtype or arrays["wte"].dtype)
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
            _turned(name, np.asarray(arrays[name])).astype(dtype).tofile(file)


class DebugState(NamedTuple):
    """What llm.c's ``train_gpt2.py`` recorded of one batch.

    Attributes:
        tokens: The batch, (B, T), int32.
        labels: The tokens that follow, (B, T), int32.
        logits: What the model gave, (B, T, V), float32, without the padding.
        loss: Their mean cross entropy.
        gradients: Of the loss, shaped as the parameters, float32.
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
        config: The shape of the model, as the checkpoint beside it has it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no debug state, or its size is not what its header and ``config`` ask for.
    """
    path = Path(path)
    header = read_header(path, "a debug state", {DEBUG_STATE_MAGIC: [DEBUG_STATE_VERSION]})
    B, T = header[2:4].tolist()
    V, count = config.vocab_size, gpt2.num_params(config)
    check_size(
        path,
        HEADER_BYTES + 4 * (2 * B * T + B * T * V + 1 + count),
        f"{B} sequences of {T} tokens, of a vocabulary of {V}, and {count} gradients",
    )
    # The dtype of the file's words changes on the way; a view of each part has its own.
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
    """AdamW's state as llm.c saves it beside a checkpoint.

    Attributes:
        step: The steps taken.
        m: The running mean of the gradients, shaped as the parameters, float32.
        v: The running mean of their squares, likewise.
        master: The parameters in float32, likewise; None where the file has none.
    """

    step: int
    m: Params
    v: Params
    master: Params | None


def read_optimizer_state(path: str | Path, config: GPT2Config) -> OptimizerState:
    """Reads the optimizer's state of a run on one device, ``state_%08d_00000.bin``.

    Args:
        path: The file.
        config: The shape of the model, as the checkpoint beside it has it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no such state, or not the size of a whole one: where a run on several
            devices split it, each of its files has a part.
    """
    path = Path(path)
    versions = {OPTIMIZER_STATE_MAGIC: [OPTIMIZER_STATE_VERSION]}
    header = read_header(path, "an optimizer state", versions)
    ranks, rank, has_master = header[2:5].tolist()
    count, trees = gpt2.num_params(config), 3 if has_master else 2
    check_size(
        path,
        HEADER_BYTES + 4 * trees * count,
        f"rank {rank} of {ranks} {'with' if has_master else 'without'} master weights "
        f"(a whole one of {count} parameters can be read)",
    )
    parts = np.memmap(path, "<f4", "r", offset=HEADER_BYTES).reshape(trees, count)
    m, v, *master = (_params_from(part, config, "float32") for part in parts)
    return OptimizerState(int(header[10]), m, v, master[0] if master else None)


def write_optimizer_state(path: str | Path, state: OptimizerState) -> None:
    """Writes the optimizer's state of a run on one device; overwrites the file.

    Args:
        path: The file.
        state: The state, stacked or with lists of layers.

    Raises:
        ValueError: A tree of the state has not the arrays of a GPT-2, or other shapes than ``m``.
    """
    words = [OPTIMIZER_STATE_MAGIC, OPTIMIZER_STATE_VERSION, 1, 0, int(state.master is not None)]
    trees = {"m": state.m, "v": state.v, "master": state.master}
    trees = {key: arrays_of(tree, key) for key, tree in trees.items() if tree is not None}
    wanted = {name: getattr(trees["m"].get(name), "shape", ()) for name in TENSORS}
    for key, arrays in trees.items():
        try:
            check({name: array.shape for name, array in arrays.items()}, wanted)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(header_of(*words, *[0] * 5, state.step))
        for arrays in trees.values():
            for name in TENSORS:
                _turned(name, np.asarray(arrays[name])).astype("<f4").tofile(file)


def _shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """The shapes of our parameters by path."""
    params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), config))
    return {name: x.shape for name, x in flatten(params).items()}


def _turned(name: str, array: np.ndarray) -> np.ndarray:
    """A tensor as the file has it, from ours; or ours, from the file's."""
    return array.swapaxes(-1, -2) if name.endswith("/weight") else array


def _params_from(numbers: np.ndarray, config: GPT2Config, dtype: DTypeLike) -> Params:
    """Our parameters from all numbers of a file's."""
    return unflatten(
        {
            name: jnp.asarray(_turned(name, part).astype(dtype, order="C"))
            for name, part in _parts(numbers, config)
        }
    )


def _parts(numbers: np.ndarray, config: GPT2Config) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file, each in the file's shape."""
    shapes, start = _shapes(config), 0
    for name in TENSORS:
        shape = shapes[name]
        if name.endswith("/weight"):
            shape = (*shape[:-2], shape[-1], shape[-2])
        size = math.prod(shape)
        yield name, numbers[start : start + size].reshape(shape)
        start += size
