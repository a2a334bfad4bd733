"""The residual that blocks pass on: what it carries, how it is changed, and as a pytree."""

import functools
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    assert_normalized,
    attention_block_arrays,
    ffn_block_arrays,
    random_arrays,
    with_gradients,
)

import jaxllm
from jaxllm import export, ops
from jaxllm.core import dispatch
from jaxllm.models.common import run_blocks
from jaxllm.ops import Residual, attention_block, ffn_block, final_norm, residual
from jaxllm.ops.block.residual import carry
from jaxllm.testing import assert_close, lower_for_cuda

SIZES = {"N": 3, "K": 3, "H": 8, "B": 2, "T": 6, "D": 24}
# The GEMMs of both blocks are large enough for the fused kernels of an H100.
LARGE = {"N": 3, "K": 3, "H": 64, "B": 132, "T": 128, "D": 192}


def layer_arrays(sizes=SIZES, dtype="float32"):
    """The input of a transformer layer, its norms, its two blocks and the last norm."""
    x, norm1, attention = attention_block_arrays(**sizes, dtype=dtype)
    rows, width = sizes["B"] * sizes["T"], sizes["D"]
    _, norm2, mlp = ffn_block_arrays(dtype, rows, width, 4 * width)
    layer = {"norm1": norm1, "attention": attention, "norm2": norm2, "mlp": mlp}
    adapter, last = random_arrays((width, width), (width,), dtype=dtype)
    return x, layer, {"scale": last}, adapter


def adapt(x, adapter):
    """What an adapter adds to the residual."""
    return jnp.tanh(x @ adapter)


def layer_with_adapter(x, layer, norm, adapter, backend=None):
    """Two blocks, an adapter after each, and the last norm."""
    h = residual(x)
    h = attention_block(
        h, layer["norm1"], layer["attention"], heads=3, causal=True, backend=backend
    )
    h = h.add(adapt(h.x, adapter))
    h = ffn_block(h, layer["norm2"], layer["mlp"], backend=backend)
    h = h.add(adapt(h.x, adapter))
    return final_norm(h, norm, backend=backend)


def unfused_layer_with_adapter(x, layer, norm, adapter):
    attention, up, down = layer["attention"], layer["mlp"]["up"], layer["mlp"]["down"]
    normalized = ops.layer_norm(x, **layer["norm1"])
    attended = ops.self_attention(normalized, **attention["qkv"], heads=3, causal=True)
    x = x + ops.linear(attended, **attention["out"])
    x = x + adapt(x, adapter)
    hidden = ops.linear(ops.layer_norm(x, **layer["norm2"]), **up, activation="gelu")
    x = x + ops.linear(hidden, **down)
    x = x + adapt(x, adapter)
    return ops.layer_norm(x, **norm)


@pytest.mark.parametrize("backend", ["xla", "pallas", "auto"])
@pytest.mark.covering(("backend",), ("form",))
def test_adapters_between_blocks_match_unfused_ops(form, backend):
    arrays = layer_arrays()
    expected = with_gradients(unfused_layer_with_adapter, arrays)
    found = with_gradients(functools.partial(layer_with_adapter, backend=backend), arrays)
    assert_close(found, expected, "float32")


@pytest.mark.parametrize("adapts", [False, True])
def test_block_normalizes_again_what_an_adapter_has_changed(on_hopper, adapts):
    def run(x, layer, norm, adapter):
        h = attention_block(
            residual(x), layer["norm1"], layer["attention"], heads=3, causal=True, backend="cuda"
        )
        h = h.add(adapt(h.x, adapter)) if adapts else h
        h = ffn_block(h, layer["norm2"], layer["mlp"], backend="cuda")
        assert h.normalized is not None
        return h.normalized.x_hat

    arrays = jax.eval_shape(lambda: layer_arrays(LARGE, "bfloat16"))
    program = lower_for_cuda(run, *arrays)
    # The norm before each block: one kernel before the first block, and one after the adapter.
    assert program.count("@jaxllm_layer_norm_forward(") == 1 + adapts
    assert program.count("@jaxllm_matmul_residual_norm(") == 2
    # The up-projection reads the norm that was computed last, the result of a stablehlo.case.
    (source,) = re.findall(r"@jaxllm_matmul_bias_gelu\(%(\w+)", program)
    _, _, made = program.partition(f"%{source}:" if f"%{source}:" in program else f"%{source} = ")
    kernel, *_ = re.findall(r"@jaxllm_(\w+)", made)
    assert kernel == ("layer_norm_forward" if adapts else "matmul_residual_norm")


@pytest.mark.parametrize("adapts", [False, True])
def test_backward_of_a_fused_layer_applies_each_norm_once(on_hopper, adapts):
    def run(*arrays):
        def loss(x, layer, norm, adapter):
            h = attention_block(residual(x), layer["norm1"], layer["attention"], heads=3)
            h = h.add(adapt(h.x, adapter)) if adapts else h
            return ffn_block(h, layer["norm2"], layer["mlp"]).x.astype("float32").sum()

        return jax.grad(loss, argnums=(0, 1, 3))(*arrays)

    with jaxllm.use_backend("cuda"):
        program = lower_for_cuda(run, *jax.eval_shape(lambda: layer_arrays(LARGE, "bfloat16")))
    assert program.count("@jaxllm_matmul_norm_backward(") == 2
    assert program.count("@jaxllm_layer_norm_forward(") == 1 + adapts


def residuals():
    """A residual in each form that blocks return, by name."""
    x, y, bias = random_arrays((2, 3, 8), (2, 3, 8), (8,))
    bare, rms = residual(x), residual(x, "rms", eps=1e-6)
    of_norm = residual(x).like(
        carry(Residual(x, "layer", 1e-5), x, normalized=bare.normalize("xla"))
    )
    return {
        "bare": bare,
        "rms": rms,
        "branch": rms.like(carry(Residual(x, "rms", 1e-6), x, branch=(y, None))).add(y),
        "normalized": of_norm,
        "branch_with_bias": carry(Residual(x, "layer", 1e-5), x, branch=(y, bias)),
        "branch_alone": carry(Residual(x, "rms", 1e-6), x, branch=(y, None)),
    }


FORMS = list(residuals())
each_form = pytest.mark.parametrize("name", FORMS)


@each_form
def test_add_drops_what_was_known_of_the_norm(name):
    h = residuals()[name]
    y = jnp.cos(h.x)
    after = h.add(y)
    assert after.normalized is None
    assert after.branch is None
    assert (after.kind, after.eps) == (h.kind, h.eps)
    assert_close(after.x, h.x + y, "float32")


@each_form
def test_array_cannot_be_set(name):
    h = residuals()[name]
    with pytest.raises(AttributeError):
        h.x = 2 * h.x  # type: ignore[misc]
    with pytest.raises(AttributeError):
        h.x_hat = h.x  # type: ignore[attr-defined]  # the class has slots
    # What makes another residual of this one is add, which drops the norm, and like, which keeps x.
    public = {name for name in dir(Residual) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(Residual, name))}
    assert methods == {"add", "normalize", "like", "tree_flatten", "tree_unflatten"}


@pytest.mark.parametrize("other", FORMS)
@each_form
def test_like_keeps_the_values(name, other):
    h, form = residuals()[name], residuals()[other]
    if h.kind != form.kind:
        return
    found = h.like(form)
    assert jax.tree.structure(found) == jax.tree.structure(form)
    assert_close(found.x, h.x, "float32")
    if found.normalized is not None:
        assert_normalized(found)


@each_form
def test_residual_is_a_pytree(name):
    h = residuals()[name]
    expected = jax.tree.leaves(h)
    for same in (
        jax.tree.map(lambda x: x, h),
        jax.jit(lambda h: h)(h),
        jax.tree.unflatten(jax.tree.structure(h), expected),
    ):
        assert jax.tree.structure(same) == jax.tree.structure(h)
        assert type(same) is Residual
        assert (same.kind, same.eps) == (h.kind, h.eps)
        for a, b in zip(jax.tree.leaves(same), expected, strict=True):
            np.testing.assert_array_equal(a, b)


@each_form
def test_residual_survives_vmap(name):
    h = residuals()[name]
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), h)
    mapped = jax.vmap(lambda h: h.add(h.x))(stacked)
    assert (mapped.kind, mapped.eps) == (h.kind, h.eps)
    assert_close(mapped.x[1], 2 * (2 * h.x), "float32")
    found = jax.vmap(lambda h: h)(stacked)
    assert jax.tree.structure(found) == jax.tree.structure(h)
    assert_close(found, stacked, "float32")


def test_kind_and_eps_are_part_of_the_treedef():
    x = jnp.ones((2, 3, 8))
    given: list[Any] = [("layer", 1e-5), ("layer", 1e-6), ("rms", 1e-5), ("rms", 1e-6)]
    treedefs = [jax.tree.structure(residual(x, kind, eps=eps)) for kind, eps in given]
    assert len(set(treedefs)) == 4
    traces = []

    @jax.jit
    def norm(h):
        traces.append((h.kind, h.eps))
        return final_norm(h, {"scale": jnp.ones(8)})

    for kind, eps in given * 2:
        norm(residual(x, kind, eps=eps))
    assert traces == given
    with pytest.raises(ValueError, match=r"kind|aux|structure|node"):
        jax.tree.map(jnp.add, residual(x), residual(x, "rms"))


@each_form
def test_residual_is_serialized_in_an_exported_program(name):
    h = residuals()[name]
    norm = {"scale": jnp.arange(8.0)}
    program = jax.export.export(
        jax.jit(lambda h: (h, final_norm(h, norm))), disabled_checks=export.disabled_checks()
    )(h)
    again = jax.export.deserialize(program.serialize())
    assert again.in_tree == jax.tree.structure(((h,), {}))
    found, out = again.call(h)
    assert jax.tree.structure(found) == jax.tree.structure(h)
    assert_close((found, out), (h, final_norm(h, norm)), "float32")


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.covering(("form", "unrolled"), ("form", "remat"), ("unrolled", "remat"))
def test_blocks_run_in_a_scan(form, remat, unrolled):
    x, layer, norm, _ = layer_arrays()
    layers = [jax.tree.map(lambda x, i=i: x * (1 + i / 8), layer) for i in range(3)]

    def block(h, layer):
        h = attention_block(h, layer["norm1"], layer["attention"], heads=3, causal=True)
        return ffn_block(h, layer["norm2"], layer["mlp"])

    def run(x, layers):
        given = layers if unrolled else jax.tree.map(lambda *a: jnp.stack(a), *layers)
        return final_norm(run_blocks(block, residual(x), given, remat=remat), norm)

    def one_by_one(x, layers):
        for each in layers:
            attention, mlp = each["attention"], each["mlp"]
            normalized = ops.layer_norm(x, **each["norm1"])
            attended = ops.self_attention(normalized, **attention["qkv"], heads=3, causal=True)
            x = x + ops.linear(attended, **attention["out"])
            normalized = ops.layer_norm(x, **each["norm2"])
            hidden = ops.linear(normalized, **mlp["up"], activation="gelu")
            x = x + ops.linear(hidden, **mlp["down"])
        return ops.layer_norm(x, norm["scale"])

    expected = with_gradients(one_by_one, (x, layers))
    assert_close(with_gradients(run, (x, layers)), expected, "float32")


def test_forward_mode_goes_along_the_array(form):
    x, layer, norm, adapter = layer_arrays()

    def run(fn, x):
        with jaxllm.use_backend("xla"):
            return jax.jvp(lambda x: fn(x, layer, norm, adapter), (x,), (jnp.cos(x),))

    found, expected = run(layer_with_adapter, x), run(unfused_layer_with_adapter, x)
    assert_close(found, expected, "float32")


def backends_of_dispatches(monkeypatch, run, forward, other):
    """The backend of each dispatch of a forward under one request, and a backward under another."""
    seen, choose = [], dispatch._choose

    def watched(op, stem, backend, *rest):
        seen.append((stem, backend))
        return choose(op, stem, backend, *rest)

    monkeypatch.setattr(dispatch, "_choose", watched)
    x, layer, *_ = layer_arrays()
    with jaxllm.use_backend(forward):
        out, pull = jax.vjp(run, x, layer)
    count = len(seen)
    with jaxllm.use_backend(other):
        pull(jnp.cos(out))
    assert any(stem.endswith("backward") for stem, _ in seen[count:])
    return {backend for _, backend in seen}


def run_attention_block(x, layer):
    return attention_block(residual(x), layer["norm1"], layer["attention"], heads=3).x


def run_ffn_block(x, layer):
    return ffn_block(residual(x), layer["norm2"], layer["mlp"]).x


def run_swiglu_block(x, layer):
    down = {"weight": layer["mlp"]["down"]["weight"][:48]}
    layers = {"gate_up": layer["mlp"]["up"], "down": down}
    return ffn_block(residual(x), layer["norm2"], layers, activation="swiglu").x


REQUESTS = [("xla", "pallas"), ("pallas", "xla"), ("auto", "xla")]


@pytest.mark.parametrize(("forward", "other"), REQUESTS)
@pytest.mark.parametrize("run", [run_attention_block, run_ffn_block])
@pytest.mark.covering(("forward",), ("other",), ("form",), ("run",))
def test_backward_runs_under_the_backend_of_the_forward(monkeypatch, form, forward, other, run):
    assert backends_of_dispatches(monkeypatch, run, forward, other) == {forward}


@pytest.mark.parametrize(("forward", "other"), REQUESTS)
def test_backward_of_swiglu_runs_under_the_backend_of_the_forward(monkeypatch, forward, other):
    assert backends_of_dispatches(monkeypatch, run_swiglu_block, forward, other) == {forward}


def test_residual_checks_its_arguments():
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        residual(jnp.ones((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="norm is 'group'; it must be 'layer' or 'rms'"):
        residual(jnp.ones((2, 3)), "group")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="eps is None; it must be a number"):
        residual(jnp.ones((2, 3)), eps=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"h is of type .*; it must be a Residual"):
        final_norm(jnp.ones((2, 3)), {"scale": jnp.ones(3)})  # type: ignore[arg-type]


@each_form
def test_final_norm_matches_the_norm_of_the_array(name):
    h = residuals()[name]
    scale, bias = random_arrays((8,), (8,))
    norm: Any = {"scale": scale} | ({"bias": bias} if h.kind == "layer" else {})
    function: Any = ops.layer_norm if h.kind == "layer" else ops.rms_norm
    assert_close(final_norm(h, norm), function(h.x, **norm, eps=h.eps), "float32")


def test_add_rejects_terms_of_another_shape_or_dtype():
    h = residual(jnp.ones((2, 3, 8), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"y has shape \(8,\); it must be \(2, 3, 8\)"):
        h.add(jnp.ones(8, jnp.bfloat16))
    with pytest.raises(TypeError, match="y has dtype float32; it must have the dtype of the resid"):
        h.add(jnp.ones((2, 3, 8)))


@pytest.mark.parametrize("name", ["x", "kind", "eps", "branch", "normalized"])
def test_no_field_can_be_set(name):
    h = residual(jnp.ones((2, 3, 8)))
    with pytest.raises(AttributeError):
        setattr(h, name, None)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"norm": {"bias": jnp.ones(8)}}, ValueError, "norm has bias; it must have scale"),
        ({"norm": jnp.ones(8)}, TypeError, "norm is of type .*; it must be a mapping"),
        ({"weights": {}}, ValueError, "weights has nothing; it must have up, down"),
        (
            {"weights": {"up": {}, "down": {}}},
            ValueError,
            r"weights\['up'\] has nothing; .* weight",
        ),
    ],
)
def test_blocks_name_the_parameters_that_are_missing(changed, error, message):
    layers = {name: {"weight": jnp.ones((8, 8))} for name in ("up", "down", "qkv", "out")}
    arguments: Any = {"norm": {"scale": jnp.ones(8)}, "weights": layers} | changed
    with pytest.raises(error, match=message):
        ffn_block(residual(jnp.ones((2, 3, 8))), **arguments)
    names: Any = {"up": "qkv", "down": "out"}
    renamed = {names.get(name, name): layer for name, layer in arguments["weights"].items()}
    for name, other in names.items():
        message = message.replace(name, other)
    with pytest.raises(error, match=message):
        attention_block(residual(jnp.ones((2, 3, 8))), arguments["norm"], renamed, heads=2)
