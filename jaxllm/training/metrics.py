"""How much of a device's arithmetic a model uses: peaks, measured rates, and the share of them."""

from __future__ import annotations

import re
import time

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# Dense bfloat16 peaks in flop/s from NVIDIA's data sheets; the first name that is found counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The dense bfloat16 peak of a device in flop/s, or None if it is not in the table.

    Args:
        device_kind: As in ``jax.devices()[0].device_kind``.
    """
    for name, peak in PEAK_FLOPS.items():
        if re.search(rf"\b{name}\b", device_kind):
            return peak
    return None


def measured_matmul_flops(
    dtype: DTypeLike | None = None, *, size: int | None = None, repeats: int = 20
) -> float:
    """The rate of large square matrix products on the default device, in flop/s.

    ``2 size^3`` operations a product, the best of three runs of ``repeats`` products, each of which
    needs the one before.

    Args:
        dtype: Of the matrices; None for bfloat16 on a GPU, float32 elsewhere.
        size: Their rows and columns; None for 8192 on a GPU, 512 elsewhere.
        repeats: Products in a run.
    """
    on_gpu = jax.default_backend() == "gpu"
    size = size or (8192 if on_gpu else 512)
    dtype = jnp.dtype(dtype or ("bfloat16" if on_gpu else "float32"))
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    weight = jax.random.normal(jax.random.key(1), (size, size), dtype) / size**0.5
    run = jax.jit(
        lambda x: jax.lax.fori_loop(0, repeats, lambda _, x: (x @ weight).astype(dtype), x)
    )
    run(x).block_until_ready()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        run(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 * repeats / min(seconds)


def model_flops_utilization(flops: float, seconds: float, device_kind: str) -> float | None:
    """The share of a device's bfloat16 peak that the model's own arithmetic reaches.

    ``MFU = flops / seconds / peak``, where a model's ``flops_per_token`` says what counts.

    Args:
        flops: What the model must compute, recomputation not counted.
        seconds: How long it took.
        device_kind: As in :func:`peak_flops`.

    Returns:
        A number between 0 and 1; None where the peak is unknown, such as on a CPU.
    """
    peak = peak_flops(device_kind)
    return None if peak is None else flops / seconds / peak
