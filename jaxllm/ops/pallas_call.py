"""What every Pallas kernel is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from jaxllm import varying


def pallas_call(
    kernel: Callable[..., Any], *, out_shape: Any, **options: Any
) -> Callable[..., Any]:
    """``pl.pallas_call``, whose results in a ``jax.shard_map`` vary as its operands do."""

    def call(*arrays: Any) -> Any:
        of_arrays = varying.shapes(out_shape, arrays)
        return pl.pallas_call(kernel, out_shape=of_arrays, **options)(*varying.alike(arrays))

    return call
