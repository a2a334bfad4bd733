"""FFI calls to the CUDA optimizer kernels in ``cuda/optimizer``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Each thread block of global_norm sums a chunk, and one thread block sums the partial sums. Chunks
# grow where there would be more than _MAX_CHUNKS.
_MIN_CHUNK = 16384
_MAX_CHUNKS = 32768


def adamw_update_unsupported(
    params, grads, ms, vs, scalars, seeds, traced, *, whole_shapes=None, **_
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if whole_shapes is not None:
        return (
            "param is sharded along other dimensions than its first; the kernel numbers the "
            "elements that it rounds stochastically one after another"
        )
    if traced is not None:
        return "b1, b2, eps or weight_decay is traced; the kernel takes numbers"
    param, grad, m = params[0].dtype, grads[0].dtype, ms[0].dtype
    if reason := _unsupported_dtype("param", param) or _unsupported_dtype("grad", grad):
        return reason
    if m != jnp.float32:
        return f"m has dtype {m}; the kernel takes float32"
    if jnp.float32 not in (param, grad) and param != grad:
        return f"grad has dtype {grad}; with param of {param} the kernel takes that or float32"
    return None


def adamw_update(
    params, grads, ms, vs, scalars, seeds, traced, *,
    b1, b2, eps, decays, copy_dtype, whole_shapes=None,
):  # fmt: skip
    """Returns ``(params, ms, vs, copies)``; all but the copies overwrite the operands."""
    assert traced is None and whole_shapes is None
    count = len(params)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*params, *ms, *vs)]
    if copy_dtype is not None:
        results += [jax.ShapeDtypeStruct(x.shape, copy_dtype) for x in params]
    # The operands are scalars, params, grads, ms and vs; the results replace params, ms and vs.
    replaced = [*range(1, 1 + count), *range(1 + 2 * count, 1 + 4 * count)]
    outputs = ffi.call(
        "adamw_update",
        results,
        scalars,
        *params,
        *grads,
        *ms,
        *vs,
        *([] if seeds is None else [seeds]),
        aliases={operand: result for result, operand in enumerate(replaced)},
        b1=b1,
        one_minus_b1=1 - b1,  # in double precision: 1 - 0.999 has five digits in float32
        b2=b2,
        one_minus_b2=1 - b2,
        eps=eps,
        weight_decays=decays,
    )
    return tuple(tuple(outputs[i * count : (i + 1) * count]) for i in range(4))


def global_norm_unsupported(arrays, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return next(filter(None, (_unsupported_dtype("tree", x.dtype) for x in arrays)), None)


def global_norm(arrays: tuple[Array, ...]) -> Array:
    """Returns the norm."""
    chunk = _MIN_CHUNK
    while sum(x.size for x in arrays) > chunk * _MAX_CHUNKS:
        chunk *= 2
    partials = sum(-(-x.size // chunk) for x in arrays)
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (partials,))]
    return ffi.call("global_norm", results, *arrays, chunk=chunk)[0]


def _unsupported_dtype(name: str, dtype: jnp.dtype) -> str | None:
    if dtype in _DTYPES:
        return None
    names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
    return f"{name} has dtype {dtype}; the kernel takes {names}"
