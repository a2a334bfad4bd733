"""Model FLOPs utilization (MFU): peak rates, measured matmul rates, and the share of the peak."""

from __future__ import annotations

import re
import time

import jax
from jax.typing import DTypeLike

from jaxllm.ops.checks import as_floating_dtype, as_integer

# Dense bfloat16 peaks in flop/s from NVIDIA's data sheets. The first matching name wins.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_kind: str) -> float | None:
    """The dense bfloat16 peak of a device in flop/s, or None if it is not in the table.

    Args:
        device_kind: The device's name, ``jax.devices()[0].device_kind``.
    """
    for name, peak in PEAK_FLOPS.items():
        # An RTX 4090 D or one of a laptop is another GPU.
        if re.search(rf"\b{name}\b(?! D\b| Laptop)", device_kind):
            return peak
    return None


def measured_matmul_flops(
    dtype: DTypeLike | None = None, *, size: int | None = None, repeats: int = 20
) -> float:
    """Measures the rate of large square matmuls on the default device, in flop/s.

    A matmul counts ``2 size^3`` operations. The result is the best of three runs. A run is a chain
    of ``repeats`` dependent matmuls.

    Args:
        dtype: The dtype of the matrices; None for bfloat16 on a GPU and float32 on a CPU.
        size: The number of rows and columns; None for 8192 on a GPU and 512 on a CPU.
        repeats: The number of matmuls in a run.

    Raises:
        TypeError: ``dtype`` is not a floating dtype of 16 bits or more, or ``size`` or ``repeats``
            is not an integer.
        ValueError: ``size`` or ``repeats`` is below 1.
    """
    on_gpu = jax.default_backend() == "gpu"
    size = as_integer("size", (8192 if on_gpu else 512) if size is None else size, least=1)
    repeats = as_integer("repeats", repeats, least=1)
    dtype = as_floating_dtype("dtype", dtype or ("bfloat16" if on_gpu else "float32"))
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
    """Model FLOPs utilization, the share of a device's dense bfloat16 peak.

    ``MFU = flops / seconds / peak``. A model's ``flops_per_token`` defines which operations count.

    Args:
        flops: The operations of the model, without recomputation.
        seconds: The time they took.
        device_kind: As in :func:`peak_flops`.

    Returns:
        The share, between 0 and 1; None if the peak is unknown, such as on a CPU.

    Raises:
        ValueError: ``seconds`` is not above 0.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; it must be above 0")
    peak = peak_flops(device_kind)
    return None if peak is None else flops / seconds / peak
