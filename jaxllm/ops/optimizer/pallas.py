"""Pallas-Triton optimizer kernels: one call per leaf of a tree.

A leaf is one row of elements, split into one block per program; elements past the end are masked.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_BLOCK, _WARPS = 512, 4  # per program of adamw_update
_SCALARS = 5
_TRACED = 4  # b1, b2, eps and weight_decay, where they are traced
_NORM_BLOCK, _NORM_WARPS = 4096, 4  # per program of global_norm, which writes a partial sum


def adamw_update_unsupported(params, grads, ms, *_, whole_shapes=None, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if whole_shapes is not None:
        return (
            "param is sharded along other dimensions than its first; the kernel numbers the "
            "elements that it rounds stochastically one after another"
        )
    if ms[0].dtype != jnp.float32:
        return f"m has dtype {ms[0].dtype}; the kernel takes float32"
    return _unsupported("param", params) or _unsupported("grad", grads)


def global_norm_unsupported(arrays, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported("tree", arrays)


def _unsupported(name: str, arrays: tuple[Array, ...]) -> str | None:
    for x in arrays:
        if x.dtype not in _DTYPES:
            names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
            return f"{name} has dtype {x.dtype}; the kernel takes {names}"
        if x.size >= 2**31:
            return f"{name} has {x.size} elements; the kernel takes fewer than 2**31"
    return None


def adamw_update(
    params,
    grads,
    ms,
    vs,
    scalars,
    seeds,
    traced,
    *,
    b1,
    b2,
    eps,
    decays,
    copy_dtype,
    whole_shapes=None,
    interpret=False,
):
    """Returns ``(params, ms, vs, copies)``."""
    assert whole_shapes is None
    if traced is not None:
        scalars = jnp.concatenate([scalars, traced])
    results = [
        _update_leaf(
            *(*arrays, scalars, seeds, i),
            functools.partial(_adamw_update_kernel, b1=b1, b2=b2, eps=eps, decay=decays[i]),
            copy_dtype,
            interpret,
        )
        for i, arrays in enumerate(zip(params, grads, ms, vs, strict=True))
    ]
    params, ms, vs, copies = zip(*results, strict=True)
    return params, ms, vs, copies if copy_dtype is not None else ()


def global_norm(arrays, *, interpret=False):
    """Returns the norm."""
    partials = [_partial_sums(x, interpret) for x in arrays if x.size]
    return jnp.sqrt(jnp.sum(jnp.concatenate([jnp.zeros(1, jnp.float32), *partials])))


def _adamw_update_kernel(
    param_ref, grad_ref, m_ref, v_ref, scalars_ref, seed_ref,
    new_param_ref, new_m_ref, new_v_ref, copy_ref, *, size, b1, b2, eps, decay,
):  # fmt: skip
    position = pl.program_id(0) * _BLOCK + jnp.arange(_BLOCK)
    inside = position < size
    lr, m_correction, v_correction, grad_scale, skip = (scalars_ref[i] for i in range(_SCALARS))
    if b1 is None:  # all four are traced
        b1, b2, eps, weight_decay = (scalars_ref[_SCALARS + i] for i in range(_TRACED))
        decay *= weight_decay
    param, grad, m, v = (_load(ref, inside) for ref in (param_ref, grad_ref, m_ref, v_ref))
    grad *= grad_scale
    new_m = b1 * m + (1 - b1) * grad
    new_v = b2 * v + (1 - b2) * grad * grad
    step = new_m * m_correction / (jnp.sqrt(new_v * v_correction) + eps)
    new_param = param - lr * (step + decay * param)
    news = ((param, new_param), (m, new_m), (v, new_v))
    param, m, v = (jnp.where(skip != 0, old, new) for old, new in news)
    seed = None if seed_ref is None else seed_ref[0]
    plgpu.store(new_m_ref, m, mask=inside)
    plgpu.store(new_v_ref, v, mask=inside)
    for ref in (new_param_ref, copy_ref):
        if ref is not None:
            plgpu.store(ref, _round(param, ref.dtype, position, seed), mask=inside)


def _norm_kernel(x_ref, partial_ref, *, size):
    inside = pl.program_id(0) * _NORM_BLOCK + jnp.arange(_NORM_BLOCK) < size
    x = _load(x_ref, inside)
    partial_ref[0] = jnp.sum(x * x)


def _load(ref, mask):
    """Reads a block as float32, zeros outside the mask."""
    return plgpu.load(ref, mask=mask, other=0.0).astype(jnp.float32)


def _round(x, dtype, position, seed):
    """Rounds as reference.py does: to the nearest, or stochastically to bfloat16."""
    if seed is None or dtype != jnp.bfloat16:
        return x.astype(dtype)
    random = position.astype(jnp.uint32) + seed
    random = (random ^ (random >> 16)) * jnp.uint32(0x7FEB352D)
    random = (random ^ (random >> 15)) * jnp.uint32(0x846CA68B)
    random = (random ^ (random >> 16)) & 0xFFFF
    bits = (lax.bitcast_convert_type(x, jnp.uint32) + random) & jnp.uint32(0xFFFF0000)
    # The value is representable in bfloat16, so the conversion is exact.
    carried = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(x == x, carried, x).astype(dtype)


def _update_leaf(param, grad, m, v, scalars, seeds, index, kernel, copy_dtype, interpret):
    """Returns the new ``(param, m, v, copy)`` of the leaf with this index."""
    if param.size == 0:
        return param, m, v, None if copy_dtype is None else param.astype(copy_dtype)
    row = pl.BlockSpec((_BLOCK,), lambda i: (i,))
    flat = [x.reshape(-1) for x in (param, grad, m, v)]
    copy = None if copy_dtype is None else jax.ShapeDtypeStruct((param.size,), copy_dtype)
    results = pallas_call(
        functools.partial(kernel, size=param.size),
        grid=(pl.cdiv(param.size, _BLOCK),),
        in_specs=[
            *[row] * 4,
            pl.BlockSpec(scalars.shape, lambda i: (0,)),
            None if seeds is None else pl.BlockSpec((1,), lambda i: (index,)),
        ],
        out_specs=[row, row, row, None if copy is None else row],
        out_shape=[*(jax.ShapeDtypeStruct(flat[i].shape, flat[i].dtype) for i in (0, 2, 3)), copy],
        input_output_aliases={0: 0, 2: 1, 3: 2},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(*flat, scalars, seeds)
    return tuple(None if x is None else x.reshape(param.shape) for x in results)


def _partial_sums(x: Array, interpret: bool) -> Array:
    """The sum of squares of each program's block."""
    programs = pl.cdiv(x.size, _NORM_BLOCK)
    return pallas_call(
        functools.partial(_norm_kernel, size=x.size),
        grid=(programs,),
        in_specs=[pl.BlockSpec((_NORM_BLOCK,), lambda i: (i,))],
        out_specs=pl.BlockSpec((1,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((programs,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=_NORM_WARPS, num_stages=1),
        interpret=interpret,
    )(x.reshape(-1))
