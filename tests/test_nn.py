"""``jaxllm.nn`` against ``jax.nn`` and against the formulas that models are written with."""

import functools
import inspect
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import nn, ops, testing

# B, T, S, N, K, H. Odd sizes, grouped queries, and sequences of one.
SHAPES = {
    "self": (2, 7, 7, 3, 3, 5),
    "grouped": (2, 9, 9, 6, 2, 16),
    "multi_query": (1, 33, 33, 4, 1, 8),
    "longer_keys": (2, 5, 11, 4, 2, 8),
    "longer_queries": (2, 11, 5, 4, 2, 8),
    "one_query": (2, 1, 7, 2, 2, 8),
    "one_key": (2, 7, 1, 2, 2, 8),
}
# What flash attention computes, by a name of SHAPES. An array is a key of ARRAYS.
SERVED = [
    ("self", {}),
    ("self", {"scale": 0.7}),
    ("self", {"is_causal": True}),
    ("grouped", {"is_causal": True, "scale": -0.3}),
    ("grouped", {"is_causal": True, "local_window_size": 3}),
    ("grouped", {"is_causal": True, "local_window_size": (2, 0)}),
    ("grouped", {"local_window_size": (2, 0)}),
    ("grouped", {"local_window_size": 2}),
    ("self", {"local_window_size": (0, 0)}),
    ("self", {"local_window_size": (1, 2)}),
    ("grouped", {"local_window_size": (0, 4), "return_residual": True}),
    ("self", {"query": "lengths", "is_causal": True, "local_window_size": 2}),
    ("grouped", {"query": "lengths", "key": "lengths"}),
    ("grouped", {"key": "lengths", "is_causal": True}),
    ("grouped", {"query": "lengths", "is_causal": True}),
    ("multi_query", {"is_causal": True}),
    ("longer_keys", {}),
    ("longer_keys", {"is_causal": True}),
    ("longer_keys", {"query": "lengths", "key": "lengths"}),
    ("longer_keys", {"key": "lengths", "is_causal": True}),
    ("longer_keys", {"is_causal": True, "local_window_size": (1, 4)}),
    ("longer_queries", {"key": "lengths"}),
    ("one_query", {}),
    ("one_query", {"is_causal": True}),
    ("one_key", {"key": "lengths"}),
    ("grouped", {"return_residual": True}),
    ("grouped", {"return_residual": True, "is_causal": True, "local_window_size": 3}),
]
# Likewise where it is asked for.
WITH_BIAS = [
    ("self", {"bias": True}),
    ("grouped", {"bias": True, "is_causal": True, "return_residual": True}),
    ("grouped", {"bias": True, "query": "lengths", "key": "lengths"}),
    ("longer_keys", {"bias": True, "is_causal": True, "local_window_size": (2, 0)}),
]
# What it does not, with the beginning of the reason.
OTHERS = [
    ("grouped", {"bias": True, "mask": True, "is_causal": True}, "mask is given"),
    ("grouped", {"mask": True}, "mask is given"),
    ("grouped", {"mask": True, "query": "lengths", "key": "lengths"}, "mask is given"),
    ("self", {"return_residual": True, "key": "lengths"}, "return_residual comes with sequence"),
    ("longer_queries", {"is_causal": True}, "is_causal is set with 11 queries and 5 keys"),
    ("self", {"local_window_size": (-1, 2), "is_causal": True}, r"local_window_size is \(-1, 2\)"),
    ("self", {"local_window_size": 1, "key": "lengths"}, "key_value_seq_lengths comes with local"),
    ("longer_keys", {"local_window_size": 2}, "local_window_size is given with 5 queries and 11"),
    ("longer_queries", {"local_window_size": (2, 0)}, "local_window_size is given with 11 queries"),
]


def case_id(value):
    if isinstance(value, dict):
        return "-".join(f"{name}={option}" for name, option in value.items()) or "plain"
    return str(value) if value in SHAPES else ""


def arrays_and_options(
    shape: str, options: dict[str, Any], dtype: str = "float32"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that have gradients, by name; all other arguments."""
    B, T, S, N, K, H = SHAPES[shape]
    options = dict(options)
    keys = iter(jax.random.split(jax.random.key(0), 8))
    draw = functools.partial(jax.random.normal, dtype=dtype)
    arrays: dict[str, Any] = {
        "query": draw(next(keys), (B, T, N, H)),
        "key": draw(next(keys), (B, S, K, H)),
        "value": draw(next(keys), (B, S, K, H)),
    }
    if options.pop("bias", None):
        arrays["bias"] = draw(next(keys), (1, N, T, S))
    if options.pop("mask", None):
        options["mask"] = jax.random.bernoulli(next(keys), 0.6, (B, 1, T, S))
    if options.pop("query", None):
        options["query_seq_lengths"] = jnp.array([T - 2, 1][:B], jnp.int32)
    if options.pop("key", None):  # the second sequence has no keys
        options["key_value_seq_lengths"] = jnp.array([(S + 1) // 2, 0][:B], jnp.int32)
    return arrays, options


def weights_like(out):
    """What a result is multiplied by, for its gradients: no two elements by the same."""
    return jnp.cos(jnp.arange(out.size, dtype="float32")).reshape(out.shape)


def results_and_gradients(function, arrays, options, dtype=None):
    def loss(arrays):
        found = function(**arrays, **options)
        terms = [(x.astype("float32") * weights_like(x)).sum() for x in jax.tree.leaves(found)]
        return sum(terms), found

    if dtype is not None:
        arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return found, gradients


def only_row(function, arrays, options):
    calls = jaxllm.explain(lambda arrays: function(**arrays, **options), arrays).calls
    assert len(calls) == 1
    return calls[0]


def assert_as_exact(arrays, options, dtype, backend):
    """Ours is as close to jax.nn in float32 as jax.nn is in the same dtype."""
    exact = results_and_gradients(jax.nn.dot_product_attention, arrays, options, "float32")
    # On a CPU jax.nn takes no float16.
    same = "float32" if dtype == "float16" else dtype
    theirs = results_and_gradients(jax.nn.dot_product_attention, arrays, options, same)
    with jaxllm.use_backend(backend):
        stem = f"flash_attention{'_bias' * ('bias' in arrays)}_forward"
        assert only_row(nn.dot_product_attention, arrays, options).stem == stem
        ours = results_and_gradients(nn.dot_product_attention, arrays, options)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b, e in zip(*map(jax.tree.leaves, (ours, theirs, exact)), strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        scale = max(1.0, float(jnp.abs(e).max()))
        found, allowed = (float(jnp.abs(x.astype("float32") - e).max()) / scale for x in (a, b))
        assert found <= testing.tolerance(dtype, allowed)


def test_signature_is_that_of_jax():
    ours, theirs = map(inspect.signature, (nn.dot_product_attention, jax.nn.dot_product_attention))
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert ours.parameters[name].kind == parameter.kind, name
        assert ours.parameters[name].default == parameter.default, name


@pytest.mark.parametrize(("shape", "options"), SERVED, ids=case_id)
def test_served_calls_match_jax(shape, options):
    assert_as_exact(*arrays_and_options(shape, options), "float32", "xla")


@pytest.mark.parametrize("backend", ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("shape", "options"), WITH_BIAS, ids=case_id)
@pytest.mark.covering(("shape",), ("options",), ("backend",))
def test_calls_with_a_bias_match_jax(shape, options, backend, with_hopper_gpus):
    arrays, options = arrays_and_options(shape, options)
    assert_as_exact(arrays, options, "float32", backend)
    call = only_row(nn.dot_product_attention, arrays, options)
    assert (call.stem, call.on_gpu) == ("flash_attention_bias_forward", "pallas")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("hidden_by", [None, "is_causal", "key_value_seq_lengths", "window"])
@pytest.mark.parametrize("bias", ["-inf", "lowest float32", "lowest bfloat16"])
@pytest.mark.covering(("bias", "backend", "hidden_by"))
def test_a_query_whose_keys_a_bias_hides(bias, hidden_by, backend):
    """The differences that the docstring has; queries 2 to 4 have none."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 1, 8))
    low = -jnp.inf if bias == "-inf" else jnp.finfo(bias.removeprefix("lowest ")).min
    biases = jnp.where(jnp.arange(5)[:, None] < 2, low, 0).astype("float32")
    options: dict[str, Any] = {
        None: {},
        "is_causal": {"is_causal": True},
        "key_value_seq_lengths": {"key_value_seq_lengths": jnp.array([3], jnp.int32)},
        "window": {"local_window_size": (1, 0)},
    }[hidden_by]
    rows, keys = np.arange(5)[:2, None], np.arange(5)
    sees = {
        None: keys >= 0 * rows,
        "is_causal": keys <= rows,
        "key_value_seq_lengths": keys < 3 + 0 * rows,
        "window": (keys <= rows) & (keys >= rows - 1),
    }[hidden_by]

    def mean(which):
        return np.stack([np.asarray(v[0, row, 0]).mean(0) for row in which])

    with jaxllm.use_backend(backend):
        found = nn.dot_product_attention(q, k, v, biases, **options)[0, :, 0]
    theirs = jax.nn.dot_product_attention(q, k, v, biases, **options)[0, :, 0]
    np.testing.assert_allclose(found[2:], theirs[2:], atol=1e-5)
    is_zero = bias == "-inf" or backend == "pallas"
    np.testing.assert_allclose(found[:2], 0 * mean(sees) if is_zero else mean(sees), atol=1e-5)
    if hidden_by:
        np.testing.assert_allclose(theirs[:2], mean(~sees), atol=1e-5)
    elif bias == "-inf":
        assert jnp.isnan(theirs[:2]).all()
    else:
        np.testing.assert_allclose(theirs[:2], mean(sees), atol=1e-5)
    if hidden_by != "key_value_seq_lengths" and is_zero:
        with jaxllm.use_backend(backend):
            _, lse = nn.dot_product_attention(q, k, v, biases, **options, return_residual=True)
        assert (lse[0, :2] == -jnp.inf).all() and jnp.isfinite(lse[0, 2:]).all()


@pytest.mark.parametrize("name", ["dot_product_attention", "swiglu", "linear_cross_entropy"])
def test_forward_mode_and_second_derivatives_need_xla(name):
    if name == "dot_product_attention":
        arrays, _ = arrays_and_options("self", {"bias": True})
        x, way = arrays.pop("query"), "implementation"
    else:
        x, way = jnp.ones((2, 4)), "backend"
        arrays = {"weight": x.T, "labels": jnp.array([0, 1])} if name != "swiglu" else {}

    of_attention = r" \(implementation='xla' of jaxllm\.nn\.dot_product_attention\)"
    of_attention = of_attention if way == "implementation" else ""

    def loss(x, **options):
        return jnp.square(getattr(nn, name)(x, **arrays, **options)).sum()

    for run in (
        lambda f: jax.jvp(f, (x,), (x,))[1],
        lambda f: jax.grad(lambda x: jnp.square(jax.grad(f)(x)).sum())(x),
    ):
        with (
            jaxllm.use_backend("pallas"),
            pytest.raises(jaxllm.BackendError, match=rf"use backend 'xla'{of_attention}(\n|$)"),
        ):
            run(loss)
        found = run(functools.partial(loss, **{way: "xla"}))
        with jaxllm.use_backend("xla"):
            np.testing.assert_allclose(run(loss), found, rtol=1e-4, atol=1e-5)


def test_a_bias_that_no_kernel_takes_runs_that_of_jax():
    arrays, options = arrays_and_options("self", {"bias": True})
    arrays = {name: x[..., :1].repeat(300, -1) for name, x in arrays.items() if name != "bias"} | {
        "bias": arrays["bias"]
    }
    call = only_row(nn.dot_product_attention, arrays, options)
    assert (call.stem, call.on_gpu) == ("dot_product_attention", "jax.nn")
    assert "heads are 300 wide" in str(call.rejected)


@pytest.mark.parametrize("shape", [(), (9,), (9, 1), (1, 9), (6, 1, 9), (2, 1, 9, 1), (2, 1, 1, 9)])
def test_a_bias_broadcasts_as_in_jax(shape):
    arrays, options = arrays_and_options("grouped", {"is_causal": True})
    arrays["bias"] = jax.random.normal(jax.random.key(9), shape)
    assert_as_exact(arrays, options, "float32", "xla")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        SERVED[3],
        ("grouped", {"query": "lengths", "key": "lengths", "is_causal": True}),
        ("grouped", {"is_causal": True, "return_residual": True}),
        ("grouped", {"bias": True, "return_residual": True}),
    ],
    ids=case_id,
)
def test_16_bits_match_jax(shape, options, dtype):
    assert_as_exact(*arrays_and_options(shape, options, dtype), dtype, "xla")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ("grouped", {"is_causal": True, "local_window_size": 3}),
        ("longer_keys", {"query": "lengths", "key": "lengths", "is_causal": True}),
    ],
    ids=case_id,
)
def test_pallas_kernels_match_jax(shape, options):
    assert_as_exact(*arrays_and_options(shape, options), "float32", "pallas")


@pytest.mark.parametrize(("shape", "options", "reason"), OTHERS, ids=case_id)
def test_other_calls_run_those_of_jax(shape, options, reason):
    arrays, options = arrays_and_options(shape, options)
    call = only_row(nn.dot_product_attention, arrays, options)
    assert (call.stem, call.on_gpu, call.fallback) == ("dot_product_attention", *["jax.nn"] * 2)
    ((name, why),) = call.rejected
    assert name == "jaxllm"
    assert why.startswith(reason.replace("\\", ""))
    ours = results_and_gradients(nn.dot_product_attention, arrays, options)
    theirs = results_and_gradients(jax.nn.dot_product_attention, arrays, options)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with pytest.raises(jaxllm.BackendError, match=f"'jaxllm' cannot serve .*: {reason}"):
        nn.dot_product_attention(**arrays, **options, implementation="jaxllm")
    for backend in ("cuda", "pallas"):
        with jaxllm.use_backend(backend), pytest.raises(jaxllm.BackendError, match=reason):
            nn.dot_product_attention(**arrays, **options)


def test_every_window_is_that_of_jax():
    """Of each mask that is served; a query whose window has no key is never served."""
    served = 0
    rng = np.random.default_rng(0)
    with jax.disable_jit(), jaxllm.use_backend("xla"):
        for T, S, causal in itertools.product((1, 3, 4), (1, 3, 4), (False, True)):
            query, key, value = (
                jnp.asarray(rng.normal(size=(1, n, 1, 2)), "float32") for n in (T, S, S)
            )
            for left, right in itertools.product(range(-1, 5), range(-1, 5)):
                rows, columns = np.arange(T)[:, None], np.arange(S)
                seen = (columns >= rows - left) & (columns <= rows + right)
                seen &= (columns <= rows) | (not causal)
                options: Any = {"is_causal": causal, "local_window_size": (left, right)}
                try:
                    out = nn.dot_product_attention(
                        query, key, value, **options, implementation="jaxllm"
                    )
                except jaxllm.BackendError:
                    continue
                served += 1
                assert seen.any(axis=1).all()
                scores = np.asarray(query[0, :, 0] @ key[0, :, 0].T) / math.sqrt(2)
                weights = np.where(seen, np.exp(scores), 0)
                expected = weights / weights.sum(axis=1, keepdims=True) @ np.asarray(value[0, :, 0])
                np.testing.assert_allclose(out[0, :, 0], expected, rtol=1e-5, atol=1e-6)
    # Causal (0 to 4, 0 to 4) for T <= S, which are 6 of 9; (left, 0) likewise; others for T == S.
    assert served == 6 * 25 + 6 * 5 + 3 * 5 * 4


@pytest.mark.parametrize("name", ["plain", "lengths", "residual"])
def test_one_sequence_needs_no_batch(name):
    arrays, options = arrays_and_options("multi_query", {"is_causal": True})
    if name == "lengths":
        options["key_value_seq_lengths"] = jnp.array([20], jnp.int32)
    options["return_residual"] = name == "residual"
    whole = nn.dot_product_attention(**arrays, **options)
    for backend in ("auto", "xla"):
        with jaxllm.use_backend(backend):
            one = nn.dot_product_attention(**{n: x[0] for n, x in arrays.items()}, **options)
        theirs = jax.nn.dot_product_attention(**{n: x[0] for n, x in arrays.items()}, **options)
        for a, b, c in zip(*map(jax.tree.leaves, (one, whole, theirs)), strict=True):
            assert a.shape == b.shape[1:] == c.shape
            np.testing.assert_allclose(a, b[0], atol=1e-5)


def test_vmap_matches_a_batch():
    arrays, options = arrays_and_options("grouped", {"is_causal": True})
    with jaxllm.use_backend("xla"):
        attend = functools.partial(nn.dot_product_attention, **options)
        np.testing.assert_allclose(
            jax.vmap(attend)(*arrays.values()), attend(*arrays.values()), atol=1e-6
        )


def test_numpy_arrays_are_taken():
    arrays, _ = arrays_and_options("self", {})
    numpy = [np.asarray(x) for x in arrays.values()]
    lengths: Any = np.array([3, 5], np.int32)
    options: Any = {"key_value_seq_lengths": lengths, "scale": np.float32(0.5)}
    for backend in ("auto", "xla"):
        with jaxllm.use_backend(backend):
            ours = nn.dot_product_attention(*numpy, **options)
        theirs = jax.nn.dot_product_attention(*numpy, **options)
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("shape", [(0, 3, 3, 2, 2, 4), (2, 0, 0, 2, 2, 4), (2, 3, 0, 2, 2, 4)])
@pytest.mark.covering(("shape",), ("backend",))
def test_arrays_without_elements_match_jax(shape, backend):
    B, T, S, N, K, H = shape
    query, key = jnp.ones((B, T, N, H)), jnp.ones((B, S, K, H))
    lengths = jnp.zeros(B, jnp.int32)
    for name in (None, "key_value_seq_lengths", "query_seq_lengths"):
        options: Any = {name: lengths} if name else {}
        with jaxllm.use_backend(backend):
            ours = nn.dot_product_attention(query, key, key, **options)
        np.testing.assert_array_equal(
            ours, jax.nn.dot_product_attention(query, key, key, **options)
        )


def test_a_traced_scale_or_window_runs_that_of_jax():
    arrays, _ = arrays_and_options("self", {})

    def loss(attend, scale):
        return attend(**arrays, scale=scale, is_causal=True).sum()

    attends = nn.dot_product_attention, jax.nn.dot_product_attention
    ours, theirs = (jax.grad(loss, 1)(attend, 0.3) for attend in attends)
    assert ours == theirs != 0
    windows = [
        jax.jit(lambda w, attend=attend: attend(**arrays, local_window_size=(w, 0)))(2)
        for attend in attends
    ]
    np.testing.assert_array_equal(*windows)
    # Numbers of other types are none of these.
    for scale in (np.float64(0.3), jnp.float32(0.3)):
        with jaxllm.use_backend("xla"):
            row = only_row(nn.dot_product_attention, arrays, {"scale": scale})
        assert row.stem == "flash_attention_forward"


def test_implementations_of_jax_can_be_named():
    arrays, options = arrays_and_options("self", {"is_causal": True})
    options["implementation"] = "xla"
    for backend in ("auto", "cuda"):  # the argument wins
        with jaxllm.use_backend(backend):
            call = only_row(nn.dot_product_attention, arrays, options)
            assert (call.on_gpu, call.rejected) == ("jax.nn xla", ())
            np.testing.assert_array_equal(
                nn.dot_product_attention(**arrays, **options),
                jax.nn.dot_product_attention(**arrays, **options),
            )
    # Beside no GPU cuDNN is an error of JAX's.
    options["implementation"] = "cudnn"
    if jax.default_backend() != "gpu":
        with pytest.raises(RuntimeError):
            nn.dot_product_attention(**arrays, **options)


def test_a_gpu_runs_our_kernels(with_kernels):
    def program(**options):  # in float32: beside a GPU, narrow 16-bit heads are left to cuDNN
        arrays, options = arrays_and_options("grouped", {"is_causal": True, **options})
        return testing.lower_for_cuda(
            lambda arrays: results_and_gradients(nn.dot_product_attention, arrays, options), arrays
        )

    served: list[Any] = [{}, {"query": "lengths", "key": "lengths"}, {"local_window_size": (2, 0)}]
    for options in served:
        assert "@jaxllm_flash_attention_forward(" in program(**options)
        assert "@jaxllm_flash_attention_backward(" in program(**options)
    assert "jaxllm" not in program(mask=True)
    assert "jaxllm_flash" in program(implementation="jaxllm")
    assert "jaxllm" not in program(implementation="xla")


def test_calls_beyond_the_kernels_run_that_of_jax(with_kernels):
    query = jax.ShapeDtypeStruct((1, 8, 2, 512), jnp.float32)  # no kernel takes heads so wide
    attend = functools.partial(nn.dot_product_attention, is_causal=True)
    (call,) = jaxllm.explain(attend, query, query, query).calls
    assert call.on_gpu == "jax.nn"
    assert ("cuda", "heads are 512 wide; the kernel takes at most 256") in call.rejected
    narrow = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.float32)
    (call,) = jaxllm.explain(attend, narrow, narrow, narrow).calls
    assert (call.stem, call.on_gpu) == ("flash_attention_forward", "cuda")
    # "jaxllm" asks for the op itself, whatever implements it.
    named = functools.partial(attend, implementation="jaxllm")
    (call,) = jaxllm.explain(named, query, query, query).calls
    assert (call.stem, call.on_gpu) == ("flash_attention_forward", "xla")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"implementation": "flash"},
            "implementation is 'flash'; it must be None or one of jaxllm",
        ),
        ({"query": jnp.ones((2, 2, 7, 3, 5))}, r"query has shape .*; it must be \(B, T, N, H\) or"),
        ({"key": jnp.ones((7, 3))}, r"key has shape \(7, 3\); it must be \(B, S, K, H\) or"),
        ({"query": jnp.ones((3, 7, 3, 5))}, r"query has shape .*; it must be \(2, T, N, 5\)"),
        ({"query": jnp.ones((2, 7, 3, 4))}, r"query has shape .*; it must be \(2, T, N, 5\)"),
        ({"value": jnp.ones((2, 6, 3, 5))}, r"value has shape .*; it must be \(2, 7, 3, 5\)"),
        (
            {"query": jnp.ones((2, 7, 4, 5))},
            "query has shape .*, 4 heads; .* multiple of that of k",
        ),
        ({"query": jnp.ones((2, 7, 3, 5), "bfloat16")}, "query has dtype bfloat16; .* float32"),
        ({"value": jnp.ones((2, 7, 3, 5), "bfloat16")}, "value has dtype bfloat16; .* float32"),
        ({"bias": jnp.ones((2, 2, 7, 7))}, r"bias has .*; it must broadcast to \(2, 3, 7, 7\)"),
        ({"bias": jnp.ones((1, 1, 1, 7, 7))}, "bias has shape .*; it must broadcast"),
        ({"mask": jnp.ones((6, 7), bool)}, r"mask has shape \(6, 7\); it must broadcast"),
        ({"mask": jnp.ones((7, 7))}, "mask has dtype float32; it must be bool"),
        ({"query_seq_lengths": jnp.ones(2)}, "query_seq_lengths has dtype float32; .* int32"),
        ({"key_value_seq_lengths": jnp.ones(3, int)}, r"key_value_seq_lengths has shape \(3,\)"),
        (
            {"local_window_size": np.ones(3, int)},
            r"local_window_size is array.*; it must be an int",
        ),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size is \(1, 2, 3\); it must be an int"),
    ],
)
def test_misfits_are_errors_before_anything_runs(wrong, message):
    array = jnp.ones((2, 7, 3, 5))
    given = {"query": array, "key": array, "value": array} | wrong
    for backend in ("auto", "cuda"):
        with jaxllm.use_backend(backend), pytest.raises(ValueError, match=message):
            nn.dot_product_attention(**given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"local_window_size": 1.5}, "local_window_size is 1.5; it must be an integer"),
        ({"local_window_size": np.ones(2)}, "local_window_size is .*1.0.*; it must be an integer"),
        ({"scale": "big"}, "scale is 'big'; it must be a number"),
    ],
)
def test_options_of_the_wrong_type_are_errors(wrong, message):
    array = jnp.ones((2, 7, 3, 5))
    with pytest.raises(TypeError, match=message):
        nn.dot_product_attention(array, array, array, **wrong)


@pytest.mark.parametrize("size", [np.array([2, 0]), jnp.array([2, 0]), [2, 0]], ids=type)
def test_a_window_may_be_an_array(size):
    arrays, options = arrays_and_options("grouped", {"is_causal": True})
    with jaxllm.use_backend("xla"):
        row = only_row(nn.dot_product_attention, arrays, options | {"local_window_size": size})
        assert row.stem == "flash_attention_forward"
        found, expected = (
            nn.dot_product_attention(**arrays, **options, local_window_size=x)
            for x in (size, (2, 0))
        )
    np.testing.assert_array_equal(found, expected)
    traced = jax.jit(lambda x: nn.dot_product_attention(**arrays, **options, local_window_size=x))(
        jnp.asarray(size)
    )
    np.testing.assert_allclose(traced, expected, atol=1e-6)


@pytest.mark.parametrize("implementation", ["jaxllm", "xla"])
@pytest.mark.parametrize(
    "options",
    [
        {"query_seq_lengths": np.array([2**32 + 1, 2**40])},
        {"key_value_seq_lengths": np.array([2**32 + 1, 2**40])},
        {"key_value_seq_lengths": [2**32 + 1, 2**40]},
        {"local_window_size": 2**31 - 1},
        {"local_window_size": np.array([2**40, 2**70])},
    ],
)
def test_lengths_and_windows_beyond_int32_hide_nothing(options, implementation):
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 4), np.float32)
    found = nn.dot_product_attention(x, x, x, implementation=implementation, **options)
    expected = nn.dot_product_attention(x, x, x, implementation="xla")
    np.testing.assert_allclose(found, expected, atol=1e-6)


# The other functions, against the formulas that models are written with.

X, HEADS = np.ones((2, 3), "float32"), np.ones((1, 3, 2, 4), "float32")


def plain_layer_norm(x, scale: Any = 1.0, bias: Any = 0.0, eps=1e-5):
    wide = x.astype("float32")
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + eps) * scale + bias).astype(x.dtype)


def plain_rms_norm(x, scale=1.0, eps=1e-5):
    wide = x.astype("float32")
    squares = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + eps) * scale).astype(x.dtype)


def plain_swiglu(gate, up=None):
    gate, up = jnp.split(gate, 2, axis=-1) if up is None else (gate, up)
    gate, up = gate.astype("float32"), up.astype("float32")
    return gate * jax.nn.sigmoid(gate) * up


def plain_loss(hidden, weight, labels, where: Any = True, reduction="mean", transpose_weight=False):
    logits = (hidden @ (weight.T if transpose_weight else weight)).astype("float32")
    losses = jax.nn.logsumexp(logits, axis=-1)
    losses -= jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    counted = jnp.broadcast_to(where, labels.shape) & (labels >= 0)
    total = jnp.where(counted, losses, 0).sum()
    return total if reduction == "sum" else total / jnp.maximum(counted.sum(), 1)


def draw(*shapes, dtype="float32"):
    keys = jax.random.split(jax.random.key(1), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def assert_same(ours, plain, arrays, dtype="float32"):
    """The values and the gradients of two functions of arrays are the same."""

    def results(function, arrays):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(weights_like(out).astype(out.dtype))

    found, expected = (jax.jit(functools.partial(results, f))(arrays) for f in (ours, plain))
    assert found[0].dtype == dtype
    testing.assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.covering(("given",), ("dtype",))
def test_layer_norm_takes_what_models_have(given, dtype):
    (x,) = draw((3, 5, 7), dtype=dtype)
    arrays = [x, *draw((7,), (7,))][: given + 1]
    assert_same(nn.layer_norm, plain_layer_norm, arrays, dtype)
    ours, plain = (functools.partial(f, eps=0.1) for f in (nn.layer_norm, plain_layer_norm))
    assert_same(ours, plain, arrays, dtype)


def test_layer_norm_may_have_a_bias_alone():
    x, bias = draw((3, 7), (7,))
    ours = functools.partial(nn.layer_norm, bias=bias)
    assert_same(ours, functools.partial(plain_layer_norm, bias=bias), [x])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", [0, 1])
def test_rms_norm_takes_what_models_have(given, dtype):
    (x,) = draw((3, 5, 7), dtype=dtype)
    arrays = [x, *draw((7,))][: given + 1]
    assert_same(nn.rms_norm, plain_rms_norm, arrays, dtype)
    ours, plain = (functools.partial(f, eps=0.1) for f in (nn.rms_norm, plain_rms_norm))
    assert_same(ours, plain, arrays, dtype)


def test_swiglu_takes_two_projections_or_one():
    assert_same(nn.swiglu, plain_swiglu, draw((3, 5, 7), (3, 5, 7)))
    assert_same(nn.swiglu, plain_swiglu, draw((3, 14)))
    gate, up = draw((3, 7), (3, 7))
    np.testing.assert_allclose(nn.swiglu(gate, up), jax.nn.silu(gate) * up, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("transpose_weight", [False, True])
@pytest.mark.covering(("transpose_weight",), ("reduction",))
def test_linear_cross_entropy_is_that_of_the_logits(reduction, transpose_weight):
    hidden, weight = draw((3, 5, 8), (11, 8) if transpose_weight else (8, 11))
    labels = jax.random.randint(jax.random.key(2), (3, 5), -2, 11)
    assert (labels < 0).any()
    options = {"reduction": reduction, "transpose_weight": transpose_weight}
    for where in (True, labels > 3, jnp.array([[True], [False], [True]]), False):
        ours, plain = (
            functools.partial(f, labels=labels, where=jnp.asarray(where), **options)
            for f in (nn.linear_cross_entropy, plain_loss)
        )
        assert_same(ours, plain, [hidden, weight])
    loss = nn.linear_cross_entropy(hidden, weight, labels, **options)
    np.testing.assert_allclose(loss, plain_loss(hidden, weight, labels, **options), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_labels_of_any_dtype_can_be_left_out(dtype):
    hidden, weight = draw((4, 8), (8, 11))
    labels, where = np.array([3, 10, 0, 7], dtype), np.array([True, False, True, False])
    loss = nn.linear_cross_entropy(hidden, weight, labels, where=where)
    expected = plain_loss(hidden, weight, jnp.asarray(labels).astype(int), jnp.asarray(where))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    listed: Any = [3, 10, 0, 7]
    np.testing.assert_allclose(
        nn.linear_cross_entropy(hidden, weight, listed),
        nn.linear_cross_entropy(hidden, weight, labels),
    )


def test_a_list_of_labels_beyond_int32_is_taken_as_their_array():
    loss: Any = functools.partial(nn.linear_cross_entropy, *draw((2, 8), (8, 11)))
    assert np.isnan(loss([3, 2**40]))  # outside the vocabulary
    np.testing.assert_array_equal(loss([3, -(2**40)]), loss([3, -1]))
    with pytest.raises(ValueError, match="labels has an integer that is beyond int32"):
        loss([3, 2**70])


def test_a_gpu_runs_the_kernels_of_the_ops(with_kernels):
    x, scale, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 64), (64,), (64, 96)))
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)
    for function, *arrays in (
        (nn.layer_norm, x),
        (nn.layer_norm, x, scale, scale),
        (nn.rms_norm, x, scale),
        (nn.swiglu, x, x),
        (nn.swiglu, x),
        (nn.linear_cross_entropy, x, weight, labels),
    ):
        calls = jaxllm.explain(function, *arrays).calls
        assert {call.on_gpu for call in calls} == {"cuda"}, function
        refused = functools.partial(function, backend="xla")
        assert {call.on_gpu for call in jaxllm.explain(refused, *arrays).calls} == {"xla"}


@pytest.mark.parametrize(
    ("function", "arrays", "error", "message"),
    [
        (nn.layer_norm, (np.ones((2, 3), int),), TypeError, "x has dtype int"),
        (nn.layer_norm, (np.ones((2, 3)), np.ones(2)), ValueError, r"scale has shape \(2,\)"),
        (nn.rms_norm, (np.ones((2, 3)), np.ones(2)), ValueError, r"scale has shape \(2,\)"),
        (nn.swiglu, (np.ones((2, 3)), np.ones((2, 4))), ValueError, r"up has shape \(2, 4\)"),
        (nn.swiglu, (np.ones((2, 3)),), ValueError, r"gate has shape \(2, 3\); without up"),
        (nn.linear_cross_entropy, (np.ones((2, 3)), np.ones((3, 4)), np.ones(2)), TypeError,
         "labels has dtype float"),
        (nn.linear_cross_entropy, (np.ones((2, 3)), np.ones((4, 3)), np.ones(2, int)), ValueError,
         r"weight has shape \(4, 3\); it must be \(3, 3\)"),
    ],
)  # fmt: skip
def test_other_misfits_are_errors(function, arrays, error, message):
    with pytest.raises(error, match=message):
        function(*arrays)


NO_ARRAYS: list[tuple[Any, dict[str, Any], list[str]]] = [
    (nn.layer_norm, {"x": X, "scale": X[0], "bias": X[0]}, ["x"]),
    (nn.rms_norm, {"x": X, "scale": X[0]}, ["x"]),
    (nn.swiglu, {"gate": X, "up": X}, ["gate"]),
    (
        nn.linear_cross_entropy,
        {"hidden": X, "weight": X.T, "labels": np.zeros(2, int), "where": np.ones(2, bool)},
        ["hidden", "weight", "labels"],
    ),
    (
        nn.dot_product_attention,
        {"query": HEADS, "key": HEADS, "value": HEADS, "bias": X[:1], "mask": X[:1] > 0}
        | {"query_seq_lengths": np.ones(1, "int32"), "key_value_seq_lengths": np.ones(1, "int32")},
        ["query", "key", "value"],
    ),
]


@pytest.mark.parametrize(
    ("function", "arrays", "needed", "name"),
    [(*case, name) for case in NO_ARRAYS for name in case[1]],
)
def test_errors_name_the_argument_that_is_no_array(function, arrays, needed, name):
    for wrong, kind in ((None, "NoneType"), ("text", "str"), ([[1.0], [1.0, 2.0]], "list")):
        if wrong is None and name not in needed:
            continue
        with pytest.raises(TypeError, match=f"^{name} has type {kind}; it must be an .*array"):
            function(**arrays | {name: wrong})


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (np.ones(2), TypeError, "where has dtype float.*; it must be bool"),
        (
            np.ones(3, bool),
            ValueError,
            r"where has shape \(3,\); it must broadcast to labels \(2,\)",
        ),
        (np.ones((2, 2), bool), ValueError, r"where has shape \(2, 2\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_an_error(where, error, message):
    with pytest.raises(error, match=message):
        nn.linear_cross_entropy(np.ones((2, 3)), np.ones((3, 4)), np.ones(2, int), where=where)


def test_defaults_are_those_of_the_ops():
    for name in ("layer_norm", "rms_norm"):
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (nn, ops))
        assert ours.parameters["eps"].default == theirs.parameters["eps"].default
