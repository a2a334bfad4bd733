"""Holds our GPT-2 to a debug state of llm.c: logits, loss, and the gradient of every tensor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from jaxllm.convert.llmc import TENSORS, DebugState, load_gpt2, read_debug_state
from jaxllm.convert.places import arrays_of, flatten
from jaxllm.models import gpt2
from jaxllm.models.blocks import Params
from jaxllm.models.gpt2 import GPT2Config

# What an error may be, as a share of the largest number of the tensor.
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}


class Row(NamedTuple):
    """How one tensor compares.

    Attributes:
        name: The tensor: ``"logits"``, ``"loss"``, or a parameter, whose gradient it is.
        largest: The largest magnitude in the file.
        error: The largest difference, as a share of that; NaN where either has a NaN.
    """

    name: str
    largest: float
    error: float


def compare(
    params: Params, config: GPT2Config, state: DebugState, *, dtype: DTypeLike = "float32"
) -> list[Row]:
    """Runs the model on the batch of a debug state and compares all that it recorded.

    Args:
        params: The parameters, the blocks stacked or in a list.
        config: Their shape.
        state: What llm.c's model gave.
        dtype: What to compute in. Gradients are of parameters in this dtype.
    """
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    tokens, labels = jnp.asarray(state.tokens), jnp.asarray(state.labels)
    logits = jax.jit(gpt2.forward, static_argnames="config")(params, tokens, config=config)
    differentiated = jax.jit(jax.value_and_grad(gpt2.loss), static_argnames="config")
    loss, gradients = differentiated(params, tokens, labels, config=config)
    found, wanted = arrays_of(gradients), flatten(state.gradients)
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
    """Reads a checkpoint and the debug state beside it, and compares.

    Args:
        checkpoint: As :func:`jaxllm.convert.llmc.load_gpt2` reads it.
        debug_state: As :func:`jaxllm.convert.llmc.read_debug_state` reads it.
        dtype: What to compute in, float32 or bfloat16.
        tolerance: What an error may be; None for that of ``dtype`` in :data:`TOLERANCES`.

    Returns:
        Whether all errors are within the tolerance, and a table to print.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is not what it should be.
    """
    params, config = load_gpt2(checkpoint)
    state = read_debug_state(debug_state, config)
    tolerance = TOLERANCES[jnp.dtype(dtype).name] if tolerance is None else tolerance
    rows = compare(params, config, state, dtype=dtype)
    faults = [row for row in rows if not row.error <= tolerance]  # so that a NaN is a fault
    lines = [f"{'tensor':28} {'largest':>10} {'error':>10}"]
    lines += [
        f"{row.name:28} {row.largest:10.3e} {row.error:10.3e}{'  <- too large' * (row in faults)}"
        for row in rows
    ]
    verdict = f"{len(faults)} of {len(rows)} are beyond" if faults else "all are within"
    lines.append(f"errors as shares of the largest number of each tensor: {verdict} {tolerance:g}")
    return not faults, "\n".join(lines)


def _row(name: str, found: jax.Array, wanted: ArrayLike) -> Row:
    wanted = np.asarray(wanted, np.float32)
    largest = float(np.max(np.abs(wanted), initial=0))
    difference = np.max(np.abs(np.asarray(found, np.float32) - wanted), initial=0)
    # Of a tensor of zeros, the difference itself.
    return Row(name, largest, float(difference) / (largest or 1.0))
