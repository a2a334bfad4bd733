"""The two-layer MLP: fused GEMMs, saved residuals and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from op_helpers import LARGE_LINEAR, mlp_arrays, with_gradients

from jaxllm.core import ffi
from jaxllm.ops import linear, mlp
from jaxllm.ops.gemm import cuda_fused
from jaxllm.ops.gemm.tile_order import TileOrdered
from jaxllm.testing import assert_close, error, lower_for_cuda


def two_linear_layers(x, up_weight, up_bias, down_weight, down_bias, **options):
    hidden = linear(x, up_weight, up_bias, activation="gelu", **options)
    return linear(hidden, down_weight, down_bias, **options)


def test_mlp_matches_two_linear_layers():
    arrays = mlp_arrays()
    expected = with_gradients(two_linear_layers, arrays)
    assert_close(with_gradients(mlp, arrays), expected, "float32")


def test_checkpoint_policy_saves_the_same_as_for_two_linear_layers():
    arrays = mlp_arrays()
    policy = jax.checkpoint_policies.save_only_these_names("linear")

    def matmuls_of(fn):
        saving = jax.checkpoint(lambda *arrays: fn(*arrays).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(saving, argnums=(0, 1, 2, 3, 4)))(*arrays)).count(
            "dot_general"
        )

    assert matmuls_of(mlp) == matmuls_of(two_linear_layers)


def test_mismatched_shapes_and_dtypes_are_rejected():
    x, up_weight, up_bias, down_weight, down_bias = mlp_arrays()
    with pytest.raises(ValueError, match=r"up_weight has shape \(6, 4\); it must be \(4, D_out\)"):
        mlp(x, up_weight.T, up_bias, down_weight, down_bias)
    with pytest.raises(ValueError, match=r"up_bias has shape \(5,\); it must be \(6,\)"):
        mlp(x, up_weight, down_bias, down_weight, down_bias)
    with pytest.raises(
        ValueError, match=r"down_weight has shape \(5, 6\); it must be \(6, D_out\)"
    ):
        mlp(x, up_weight, up_bias, down_weight.T, down_bias)
    with pytest.raises(ValueError, match=r"down_bias has shape \(6,\); it must be \(5,\)"):
        mlp(x, up_weight, up_bias, down_weight, up_bias)
    with pytest.raises(TypeError, match="down_bias has dtype float16; it must have the dtype of x"):
        mlp(x, up_weight, up_bias, down_weight, down_bias.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        mlp(jnp.float32(1), up_weight, up_bias, down_weight, down_bias)
    with pytest.raises(ValueError, match="activation is None; it must be 'gelu'"):
        mlp(x, up_weight, up_bias, down_weight, down_bias, activation=None)  # type: ignore[arg-type]


LARGE = LARGE_LINEAR | {"width": 64}


def mlp_under(backend, arrays):
    return with_gradients(lambda *a: mlp(*a, backend=backend), arrays)


def mlp_program(dtype, sizes, backend="cuda"):
    arrays = jax.eval_shape(lambda: mlp_arrays(dtype, **sizes))
    return lower_for_cuda(lambda *a: mlp_under(backend, a), *arrays)


def test_large_mlp_on_hopper_fuses_gelu_into_its_gemms(on_hopper):
    program = mlp_program("bfloat16", LARGE)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["bias_add_backward", "matmul_bias_gelu", "matmul_dgelu"]
    assert len(re.findall("dot_general", program)) == 4


@pytest.mark.parametrize(
    ("dtype", "changed", "why"),
    [
        ("float32", {}, "x has dtype float32; the fused GEMM takes bfloat16 and float16"),
        ("bfloat16", {"width": 60, "out": 60}, "widths that are no multiples of 8"),
        ("bfloat16", {"hidden": 188}, "widths that are no multiples of 8"),
        ("float16", {"rows": 131 * 128}, "the GEMM has 131 tiles"),
    ],
)
def test_other_mlps_run_gelu_kernels_after_the_gemms(on_hopper, dtype, changed, why):
    sizes = LARGE | changed
    x, weight, *_ = jax.eval_shape(lambda: mlp_arrays(dtype, **sizes))
    assert why in str(cuda_fused.gemm_unsupported(x, weight.shape[1]))
    program = mlp_program(dtype, sizes)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["bias_add_backward", "bias_gelu_backward", "bias_gelu_forward"]
    assert len(re.findall("dot_general", program)) == 6


@pytest.mark.parametrize(
    ("changed", "kernels"),
    [
        ({"width": 60}, ["bias_gelu_backward", "bias_gelu_forward"]),
        ({"out": 60}, ["bias_gelu_backward", "matmul_bias_gelu"]),
    ],
)
def test_dgelu_is_saved_only_where_both_gemms_are_fused(on_hopper, changed, kernels):
    program = mlp_program("bfloat16", LARGE | changed)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["bias_add_backward", *kernels]


def test_auto_saves_dgelu_for_hopper_and_matches_reference_on_other_devices(on_hopper):
    program = mlp_program("bfloat16", LARGE, "auto")
    assert {"matmul_bias_gelu", "matmul_dgelu"} < set(re.findall(r"@jaxllm_(\w+)", program))
    arrays = mlp_arrays("bfloat16", **LARGE)
    # The reference packs what it saves as the kernel does.
    saved = jax.tree.leaves(jax.vjp(functools.partial(mlp, backend="auto"), *arrays)[1])
    tiles = jax.eval_shape(lambda: TileOrdered(jnp.zeros(0), ()).pack(jnp.zeros((16896, 192))))
    assert tiles.array.shape in [leaf.shape for leaf in saved]
    expected = mlp_under("xla", [x.astype("float32") for x in arrays])
    assert_close(mlp_under("auto", arrays), expected, "bfloat16", mlp_under("xla", arrays))


def test_fused_gemms_are_rejected_without_hopper(monkeypatch):
    x, weight, *_ = jax.eval_shape(lambda: mlp_arrays("bfloat16", **LARGE))
    monkeypatch.setattr(ffi, "no_hopper_reason", lambda: "there is none")
    assert cuda_fused.gemm_unsupported(x, weight.shape[1]) == "there is none"


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "width", "hidden"),
    [(1, 8, 8), (127, 64, 264), (129, 72, 256), (300, 520, 248), (2500, 1032, 1544)],
)
def test_fused_gemms_match_reference_for_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    arrays = mlp_arrays(dtype, rows=rows, width=width, hidden=hidden, out=width)
    skip_if_declined(lambda: cuda_fused.gemm_unsupported(arrays[0], hidden))
    fused = mlp_under("cuda", arrays)
    again = mlp_under("cuda", arrays)
    wide = [x.astype("float32") for x in arrays]
    expected = mlp_under("xla", wide)
    reference = mlp_under("xla", arrays)
    assert_close(fused, expected, dtype, reference)
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(again), strict=True):
        assert error(a, b) == 0


@pytest.mark.gpu
def test_vmap_launches_a_fused_gemm_per_call(monkeypatch):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    first, second = (
        mlp_arrays("bfloat16", rows=rows, width=64, hidden=264, out=64) for rows in (130, 130)
    )
    second = [2 * x for x in second]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.vmap(lambda *a: mlp_under("cuda", a))(*stacked)
    for i, arrays in enumerate((first, second)):
        one = mlp_under("cuda", arrays)
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), one, "bfloat16")
