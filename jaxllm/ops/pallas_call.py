"""What every Pallas kernel is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    ManualAxisType,
    get_abstract_mesh,
    use_abstract_mesh,
)

from jaxllm.core import vma

TARGET = "__gpu$xla.gpu.triton"  # the custom call that Pallas lowers a kernel to
# The GPU that a process without one lowers kernels for. Their Triton code is the same for all GPUs
# from this one on: XLA compiles it for the GPU that it finds.
_LEAST_GPU = AbstractDevice(device_kind="NVIDIA A100", num_cores=None, platform="gpu")


def pallas_call(
    kernel: Callable[..., Any], *, out_shape: Any, interpret: bool = False, **options: Any
) -> Callable[..., Any]:
    """``pl.pallas_call``, whose results in a ``jax.shard_map`` vary as its operands do.

    A kernel is a program also under ``jax.disable_jit``, which would unroll its loops in Python.
    """

    def call(*arrays: Any) -> Any:
        axes = vma.axes_of(arrays)
        # On a GPU the kernel is traced for arrays of one device: see _on_gpu.
        of_arrays = vma.shapes(out_shape, arrays) if interpret else _invariant(out_shape)
        run = pl.pallas_call(kernel, out_shape=of_arrays, interpret=interpret, **options)
        with jax.disable_jit(False):
            if interpret:
                return _mappable(run)(*vma.alike(arrays))
            return vma.vary(_on_gpu(run, *vma.alike(arrays)), axes)

    return call


# A grid needs arrays with elements. JAX's rule for jax.vmap makes one of none for an empty batch.


def _mappable(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, also under ``jax.vmap`` along an axis of size 0."""
    mappable = jax.custom_batching.custom_vmap(run)

    @mappable.def_vmap
    def _(size: int, flags: Any, *arrays: Any) -> tuple[Any, Any]:
        each = jax.vmap(run, jax.tree.map(lambda is_mapped: 0 if is_mapped else None, flags))
        found = _mappable(each)(*arrays) if size else _empty(jax.eval_shape(each, *arrays))
        return found, jax.tree.map(lambda _: True, found)

    return mappable


def _empty(structs: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)


def _invariant(structs: Any) -> Any:
    kind = ManualAxisType(varying=frozenset())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind), structs
    )


# A kernel for a GPU stands in a branch that no other device takes. jax.export for several platforms
# lowers that branch for each of them, and JAX has no lowering of a kernel for a CPU.


def _on_gpu(fn: Callable[..., Any], *arrays: Any) -> Any:
    """``fn(*arrays)``, which lowers to zeros for another device than a GPU."""
    leaves, tree = jax.tree.flatten(arrays)
    # Traced for arrays of one device, whatever the mesh around is.
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_gpu())):
        program, out = jax.make_jaxpr(lambda *x: fn(*tree.unflatten(x)), return_shape=True)(
            *structs
        )
    return jax.tree.structure(out).unflatten(_on_gpu_p.bind(*leaves, program=program))


def _gpu() -> AbstractDevice | None:
    """The GPU to make kernels for; None for JAX's default device."""
    around = get_abstract_mesh().abstract_device
    if around is not None and around.platform in ("gpu", "cuda"):
        return around
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    platform = getattr(device, "platform", device) or jax.default_backend()
    return None if platform in ("gpu", "cuda") else _LEAST_GPU


_on_gpu_p = Primitive("jaxllm_on_gpu")
_on_gpu_p.multiple_results = True


@_on_gpu_p.def_impl
def _run(*arrays: Any, program: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(program)(*arrays)


@_on_gpu_p.def_abstract_eval
def _types(*_: Any, program: ClosedJaxpr) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in program.out_avals]


def _never(*_: Any, program: ClosedJaxpr) -> list[Any]:
    return _empty(program.out_avals)


def _lower(context: mlir.LoweringRuleContext, *arrays: Any, program: ClosedJaxpr) -> Any:
    of_program = context.replace(avals_in=program.in_avals, avals_out=program.out_avals)
    return mlir.lower_fun(_run, multiple_results=True)(of_program, *arrays, program=program)


def _batch(arrays: Any, axes: Any, *, program: ClosedJaxpr) -> tuple[list[Any], list[int]]:
    sizes = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}
    if sizes == {0}:
        results = [jnp.zeros((0, *x.shape), x.dtype) for x in program.out_avals]
    else:
        results = jax.tree.leaves(_on_gpu(jax.vmap(jaxpr_as_fun(program), axes), *arrays))
    return results, [0] * len(results)


batching.primitive_batchers[_on_gpu_p] = _batch
mlir.register_lowering(_on_gpu_p, mlir.lower_fun(_never, multiple_results=True))
mlir.register_lowering(_on_gpu_p, _lower, platform="cuda")
