"""What could run the kernels of the ``pallas`` backend once JAX drops Pallas's Triton backend?

``python -m benchmarks.pallas_successors`` times one norm and one matmul, in one run on one GPU: our
Pallas kernel, the same kernel in Mosaic GPU and in Triton (called through jax-triton), our CUDA
kernel, and XLA. Every result is compared with a float32 reference first. ``docs/pallas.md`` has the
figures and what follows from them.

Mosaic GPU needs JAX 0.11, and Triton needs the packages ``jax-triton`` and ``triton``. A variant
that cannot run has the reason in its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from benchmarks import timing
from benchmarks.record import format_table, provenance
from jaxllm import ops

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # the variant's row has the reason
    plgpu: Any = None

EPS = 1e-5
# Each result is rounded to bfloat16 once: by at most 2^-8 of it. A tenth is left for the order of
# sums.
TOLERANCE = 1.1 * 2.0**-8


# RMS norm, as in jaxllm/ops/norm/pallas.py: one pass over whole rows, which stay in registers.


def rms_norm_mosaic(x: Array, scale: Array) -> Array:
    """Mosaic GPU: a warpgroup has four rows, one a warp, and a lane 16 bytes at a time.

    There are no masks: the rows must be a multiple of four, the width a multiple of 256.
    """
    rows, width = x.shape
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((4, 256), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )

    def kernel(x_ref, scale_ref, out_ref):
        here = pl.ds(4 * lax.axis_index("block"), 4)
        x = plgpu.load(x_ref.at[here], layout=layout, optimized=False).astype(jnp.float32)
        scale = plgpu.load(scale_ref, layout=layout.reduce(0), optimized=False)
        rstd = lax.rsqrt(jnp.sum(x * x, axis=1) / width + EPS)
        out = x * lax.broadcast_in_dim(rstd, x.shape, (0,))
        out *= lax.broadcast_in_dim(scale.astype(jnp.float32), x.shape, (1,))
        out_ref[here] = out.astype(out_ref.dtype)

    return plgpu.kernel(kernel, out_type=_like(x), grid=(rows // 4,), grid_names=("block",))(
        x, scale
    )


def rms_norm_triton(x: Array, scale: Array, **options: Any) -> Array:
    """Triton: a program has one row; the width is rounded up to a power of two and masked."""
    rows, width = x.shape
    block = pl.next_power_of_2(width)
    return _jax_triton().triton_call(
        x, scale,
        kernel=_triton_kernels().rms_norm, out_type=_like(x), grid=(rows,),
        num_warps=1 if block <= 1024 else min(block // 512, 32), num_stages=1,
        width=width, block=block, eps=EPS, **options,
    )  # fmt: skip


# Matmul, as in jaxllm/ops/gemm/pallas.py, except that Mosaic GPU's kernels have no masks.


def matmul_mosaic_mma(a: Array, b: Array) -> Array:
    """Mosaic GPU with ``mma.sync``, from sm_80 on: a warpgroup has a tile of 128x128.

    On Hopper TMA fills the four stages, before Hopper cp.async.
    """
    (M, K), N = a.shape, b.shape[1]

    def kernel(a_ref, b_ref, out_ref):
        rows, columns = pl.ds(128 * lax.axis_index("i"), 128), pl.ds(128 * lax.axis_index("j"), 128)

        def step(_, a_smem, b_smem, total):
            a = plgpu.load(a_smem, layout=plgpu.Layout.MMA_LHS(a_smem.dtype))
            b = plgpu.load(b_smem, layout=plgpu.Layout.MMA_RHS(b_smem.dtype))
            return plgpu.mma(total, a, b)

        zeros = jnp.zeros((128, 128), jnp.float32)
        total = plgpu.emit_pipeline(
            step,
            grid=(K // 64,),
            in_specs=_k_blocks(128, 128),
            max_concurrent_steps=4,
            init_carry=plgpu.layout_cast(zeros, plgpu.Layout.MMA_ACC(a_ref.dtype)),
        )(a_ref.at[rows], b_ref.at[:, columns])
        out_ref[rows, columns] = total.astype(out_ref.dtype)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, N), a.dtype),
        grid=(M // 128, N // 128),
        grid_names=("i", "j"),
    )(a, b)


def matmul_mosaic_wgmma(a: Array, b: Array) -> Array:
    """Mosaic GPU with ``wgmma``, Hopper only: persistent CTAs, tiles of 128x256.

    A producer warpgroup fills four stages by TMA; each of two consumer warpgroups has half of the
    columns, and writes them through shared memory, 64x64 at a time.
    """
    (M, K), N = a.shape, b.shape[1]
    tiles = (M // 128, N // 256)

    def kernel(a_ref, b_ref, out_ref):
        pipeline = functools.partial(
            plgpu.emit_pipeline_warp_specialized,
            grid=(K // 64,),
            in_specs=_k_blocks(128, 256),
            wg_axis="warpgroup",
            num_compute_wgs=2,
            memory_registers=40,
            max_concurrent_steps=4,
        )
        stages = pipeline(lambda *_: None, compute_context=lambda _: None)

        @functools.partial(
            pl.run_scoped,
            stages=stages.get_allocations(a_ref, b_ref),
            staging=plgpu.SMEM((2, 2, 64, 64), out_ref.dtype, transforms=_swizzled()),
            collective_axes="warpgroup",
        )
        def _(stages, staging):
            warpgroup = lax.axis_index("warpgroup")
            half = pl.ds(128 * warpgroup, 128)

            @plgpu.nd_loop((math.prod(tiles),), collective_axes="cta")
            def _(loop):
                i, j = plgpu.planar_snake(loop.index[0], tiles, 1, 8)  # neighbours share L2
                rows, columns = pl.ds(128 * i, 128), pl.ds(256 * j, 256)
                out = out_ref.at[rows, columns].at[:, half]

                def step(_, a_smem, b_smem, total_ref):
                    plgpu.wgmma(total_ref, a_smem, b_smem.at[:, half])
                    plgpu.wgmma_wait(0)
                    return total_ref

                def consume(run_mainloop):
                    def with_accumulator(total_ref):
                        run_mainloop(total_ref)
                        total = total_ref[...].astype(out_ref.dtype)
                        for quarter in range(4):
                            here = staging.at[warpgroup, quarter % 2]
                            m, n = 64 * (quarter // 2), 64 * (quarter % 2)
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                            here[...] = total[m : m + 64, n : n + 64]
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(here, out.at[m : m + 64, n : n + 64])

                    pl.run_scoped(with_accumulator, plgpu.ACC((128, 128), jnp.float32))

                pipeline(step, compute_context=consume)(
                    a_ref.at[rows], b_ref.at[:, columns], allocations=stages
                )

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, N), a.dtype),
        grid=(jax.devices()[0].core_count,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
    )(a, b)


def matmul_mosaic_example(a: Array, b: Array) -> Array:
    """JAX's own example of a Hopper matmul in Mosaic GPU, with the tiles of ours."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as example

    config = example.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_tile_width=8
    )
    return example.matmul(a, b, None, config)


def matmul_triton(a: Array, b: Array, *, tile=(128, 128, 64), group=1, **options: Any) -> Array:
    """Triton: a program has a tile; ``group`` rows of tiles run side by side, to share L2."""
    (M, K), N = a.shape, b.shape[1]
    return _jax_triton().triton_call(
        a, b,
        kernel=_triton_kernels().matmul,
        out_type=jax.ShapeDtypeStruct((M, N), a.dtype),
        grid=(pl.cdiv(M, tile[0]) * pl.cdiv(N, tile[1]),),
        num_warps=8, num_stages=3,
        M=M, N=N, K=K, tile_m=tile[0], tile_n=tile[1], tile_k=tile[2], group=group, **options,
    )  # fmt: skip


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _swizzled() -> tuple[Any, ...]:
    """The layout in shared memory that TMA and the tensor cores share, for 64 elements a row."""
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def _k_blocks(m: int, n: int) -> list[Any]:
    """The blocks of both factors for 64 of K; m rows of the one, n columns of the other."""
    return [
        plgpu.BlockSpec((m, 64), lambda k: (0, k), transforms=_swizzled()),
        plgpu.BlockSpec((64, n), lambda k: (k, 0), transforms=_swizzled()),
    ]


def _jax_triton() -> Any:
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(f"pip install jax-triton triton ({error})") from error
    return jax_triton


@functools.cache
def _triton_kernels() -> Any:
    """The Triton kernels; a namespace."""
    import types

    import triton
    import triton.language as tl

    @triton.jit
    def rms_norm(
        x_ptr, scale_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr, eps: tl.constexpr
    ):
        columns = tl.arange(0, block)
        inside = columns < width
        start = tl.program_id(0).to(tl.int64) * width
        x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
        out = x * rstd * scale
        tl.store(out_ptr + start + columns, out.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def matmul(
        a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
        tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, group: tl.constexpr,
    ):  # fmt: skip
        tiles_m, tiles_n = tl.cdiv(M, tile_m), tl.cdiv(N, tile_n)
        i, j = tl.swizzle2d(
            tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, group
        )
        rows = i * tile_m + tl.arange(0, tile_m)
        columns = j * tile_n + tl.arange(0, tile_n)
        total = tl.zeros((tile_m, tile_n), tl.float32)
        for start in range(0, K, tile_k):
            depth = start + tl.arange(0, tile_k)
            a = tl.load(
                a_ptr + rows[:, None] * K + depth[None, :],
                mask=(rows[:, None] < M) & (depth[None, :] < K),
                other=0.0,
            )
            b = tl.load(
                b_ptr + depth[:, None] * N + columns[None, :],
                mask=(depth[:, None] < K) & (columns[None, :] < N),
                other=0.0,
            )
            total = tl.dot(a, b, total)
        tl.store(
            out_ptr + rows[:, None] * N + columns[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(rows[:, None] < M) & (columns[None, :] < N),
        )

    return types.SimpleNamespace(rms_norm=rms_norm, matmul=matmul)


# Cases


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: random inputs, a float32 reference, and the variants to time.

    Attributes:
        name: The op and its sizes.
        shapes: The shapes of the inputs, all bfloat16.
        reference: The op in float32.
        variants: A function of the inputs for each name.
        work: Bytes or floating-point operations of a call.
        unit: ``"GB/s"`` or ``"TFLOP/s"``.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    reference: Callable[..., Array]
    variants: dict[str, Callable[..., Array]]
    work: int
    unit: str


def norm_case(rows: int, width: int) -> Case:
    """RMS norm of ``rows`` rows, without the statistics that a backward pass would read."""

    def reference(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPS) * scale

    return Case(
        f"rms_norm {rows}x{width}",
        ((rows, width), (width,)),
        reference,
        {
            "Pallas, Triton backend": functools.partial(ops.rms_norm, eps=EPS, backend="pallas"),
            "Pallas, Mosaic GPU": rms_norm_mosaic,
            "Triton, jax-triton": rms_norm_triton,
            "CUDA": functools.partial(ops.rms_norm, eps=EPS, backend="cuda"),
            "XLA": functools.partial(ops.rms_norm, eps=EPS, backend="xla"),
        },
        work=2 * 2 * rows * width,
        unit="GB/s",
    )


def matmul_case(M: int, K: int, N: int) -> Case:
    """``(M, K) @ (K, N)`` with float32 accumulation."""
    return Case(
        f"matmul {M}x{K}x{N}",
        ((M, K), (K, N)),
        functools.partial(jnp.matmul, precision="highest"),
        {
            "Pallas, Triton backend": functools.partial(ops.matmul, backend="pallas"),
            "Pallas, Mosaic GPU, mma": matmul_mosaic_mma,
            "Pallas, Mosaic GPU, wgmma": matmul_mosaic_wgmma,
            "Pallas, Mosaic GPU, JAX's example": matmul_mosaic_example,
            "Triton, jax-triton": matmul_triton,
            "Triton, jax-triton, 128x256, grouped": functools.partial(
                matmul_triton, tile=(128, 256, 64), group=8
            ),
            "CUDA": functools.partial(ops.matmul, backend="cuda"),
            "XLA": functools.partial(ops.matmul, backend="xla"),
        },
        work=2 * M * K * N,
        unit="TFLOP/s",
    )


CASES = (
    norm_case(16384, 2048),
    norm_case(32768, 768),
    matmul_case(16384, 2048, 5632),
    matmul_case(32768, 768, 3072),
)


def inputs(case: Case, seed: int) -> tuple[Array, ...]:
    """Normal random inputs of a case."""
    keys = jax.random.split(jax.random.key(seed), len(case.shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, case.shapes, strict=True)
    )


def largest_error(fn: Callable[..., Array], case: Case, arrays: Sequence[Array]) -> float:
    """The largest error of a result, relative to the largest element of the reference.

    Raises:
        ArithmeticError: It is above :data:`TOLERANCE`, or a result is not a number.
    """

    @jax.jit
    def compare(out, *arrays):
        wanted = case.reference(*(x.astype(jnp.float32) for x in arrays))
        return jnp.max(jnp.abs(out.astype(jnp.float32) - wanted)) / jnp.max(jnp.abs(wanted))

    error = float(compare(fn(*arrays), *arrays))
    if not error <= TOLERANCE:
        raise ArithmeticError(f"the error is {error:.2e}, above {TOLERANCE:.2e}")
    return error


def time_case(case: Case, repetitions: int, names: Sequence[str] = ("",)) -> list[list[str]]:
    """One row for each variant: time, rate, error, and the reason if it failed.

    Only variants are run whose name contains one of ``names``.
    """
    size = 2 * sum(map(math.prod, case.shapes))
    count, note = timing.number_of_sets(size)
    sets = [inputs(case, seed) for seed in range(count)]
    rows = []
    for name, variant in case.variants.items():
        if not any(part in name for part in names):
            continue
        fn = jax.jit(variant)
        try:
            error = largest_error(fn, case, sets[0])
            took = timing.time_jax(fn, sets, repetitions=repetitions)
            median = took.percentile(50)
            rate = case.work / median / (1e3 if case.unit == "GB/s" else 1e6)
            spread = f"{took.percentile(20):.1f}-{took.percentile(80):.1f}"
            notes = "; ".join(filter(None, (took.timer, took.note, note)))
            rows.append([name, f"{median:.1f}", spread, f"{rate:.0f}", f"{error:.1e}", notes])
        except Exception as failure:  # one row
            lines = str(failure).strip().splitlines()
            reason = f"{type(failure).__name__}: {lines[0] if lines else ''}"
            rows.append([name, *4 * ["-"], reason[:160]])
        print(f"  {case.name}, {name}: {' '.join(rows[-1][1:])}", file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Checks and times every variant; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pallas_successors", description=__doc__
    )
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--variant", nargs="+", default=[""], help="parts of names; default: all")
    options = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU here")
    print(", ".join(f"{name} {value}" for name, value in provenance().items() if value))
    for package in ("jax_triton", "triton"):
        try:
            print(f"{package} {__import__(package).__version__}")
        except ImportError as error:
            print(error)
    limits = timing.jax_limits("trace")
    print(f"copy {limits.copy_gb_per_s:.0f} GB/s, matmul {limits.matmul_tflop_per_s:.0f} TFLOP/s")
    for case in CASES:
        rows = time_case(case, options.repetitions, options.variant)
        print(f"\n{case.name}, bfloat16")
        print(format_table(["variant", "median us", "p20-p80", case.unit, "error", "note"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
