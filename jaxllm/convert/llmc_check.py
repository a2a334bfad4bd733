"""Compares GPT-2 with a debug state of llm.c: logits, loss, and the gradient of every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from jaxllm.convert.llmc import TENSORS, DebugState, load_gpt2, read_debug_state
from jaxllm.convert.parameter_mapping import check_dtype, flatten, stacked_arrays
from jaxllm.models import gpt2
from jaxllm.models.common import Params
from jaxllm.models.gpt2 import GPT2Config
from jaxllm.ops.checks import as_float

# The largest allowed error, as a share of the tensor's largest magnitude.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}


class Row(NamedTuple):
    """The comparison of one tensor.

    Attributes:
        name: ``"logits"``, ``"loss"``, or the path of a parameter, for its gradient.
        largest: The largest magnitude in the debug state.
        error: The largest difference as a share of ``largest``; NaN if either tensor has a NaN.
    """

    name: str
    largest: float
    error: float


def compare(
    params: Params, config: GPT2Config, state: DebugState, *, dtype: DTypeLike = "float32"
) -> list[Row]:
    """Runs the model on the batch of a debug state, and compares the results.

    Args:
        params: The parameters, the blocks stacked or in a list.
        config: The config of the model.
        state: The debug state.
        dtype: The compute dtype, to which the parameters are cast.

    Returns:
        A row for the logits, for the loss, and for each gradient.
    """
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    tokens, labels = jnp.asarray(state.tokens), jnp.asarray(state.labels)
    logits = jax.jit(gpt2.forward, static_argnames="config")(params, tokens, config=config)
    differentiated = jax.jit(jax.value_and_grad(gpt2.loss), static_argnames="config")
    loss, gradients = differentiated(params, tokens, labels, config=config)
    found, wanted = stacked_arrays(gradients), flatten(state.gradients)
    return [
        _row("logits", logits[..., : config.vocab_size], state.logits),
        _row("loss", loss, np.float32(state.loss)),
        *(_row(name, found[name], wanted[name]) for name in TENSORS),
    ]


def check(
    checkpoint: str | Path,
    debug_state: str | Path,
    *,
    dtype: DTypeLike = "float32",
    tolerance: float | None = None,
) -> tuple[bool, str]:
    """Compares a checkpoint with its debug state.

    Args:
        checkpoint: The file of :func:`jaxllm.convert.llmc.load_gpt2`.
        debug_state: The file of :func:`jaxllm.convert.llmc.read_debug_state`.
        dtype: The compute dtype, float32 or bfloat16.
        tolerance: The largest allowed error, as a share of a tensor's largest magnitude; None for
            the value in :data:`TOLERANCES`.

    Returns:
        ``(passed, table)``: whether all errors are within the tolerance, and a table to print.

    Raises:
        FileNotFoundError: A file does not exist.
        TypeError: ``dtype`` is not a floating dtype, or ``tolerance`` is not a number.
        ValueError: A file is invalid, or ``dtype`` has no entry in :data:`TOLERANCES` and
            ``tolerance`` is None.
    """
    dtype = check_dtype(dtype)
    if tolerance is None and dtype.name not in TOLERANCES:
        raise ValueError(f"dtype is {dtype}; without a tolerance it must be float32 or bfloat16")
    limit = TOLERANCES[dtype.name] if tolerance is None else as_float("tolerance", tolerance)
    params, config = load_gpt2(checkpoint)
    state = read_debug_state(debug_state, config)
    rows = compare(params, config, state, dtype=dtype)
    faults = [row for row in rows if not row.error <= limit]  # a NaN is a fault too
    lines = [f"{'tensor':28} {'largest':>10} {'error':>10}"]
    lines += [
        f"{row.name:28} {row.largest:10.3e} {row.error:10.3e}{'  <- too large' * (row in faults)}"
        for row in rows
    ]
    verdict = f"{len(faults)} of {len(rows)} exceed" if faults else "all are within"
    lines.append(f"errors relative to the largest magnitude of each tensor: {verdict} {limit:g}")
    return not faults, "\n".join(lines)


def _row(name: str, found: jax.Array, wanted: ArrayLike) -> Row:
    wanted = np.asarray(wanted, np.float32)
    largest = float(np.max(np.abs(wanted), initial=0))
    difference = np.max(np.abs(np.asarray(found, np.float32) - wanted), initial=0)
    # For a tensor of zeros, the absolute difference.
    return Row(name, largest, float(difference) / (largest or 1.0))
