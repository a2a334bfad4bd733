"""Optimizer ops: optax parity, stochastic rounding, in-place updates and errors."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxllm
from jaxllm import ops, testing, training
from jaxllm.core import ffi
from jaxllm.models import gpt2
from jaxllm.ops.optimizer import cuda, reference

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=32)


def fresh(seed, *shape, dtype="float32"):
    """Random ``(param, grad, m, v)``."""
    keys = jax.random.split(jax.random.key(seed), 4)
    param, grad, m, v = (jax.random.normal(key, shape) for key in keys)
    return param.astype(dtype), grad, m, v * v


def random_like(tree, key):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return structure.unflatten(
        jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)
    )


def bits(x):
    return np.asarray(jax.lax.bitcast_convert_type(x, jnp.uint16))


def hundred_steps(config, backend):
    """How far parameters differ from optax after 100 steps, and how far they moved."""
    params = gpt2.init(jax.random.key(0), config)
    mask = training.decay_mask(params)
    schedule = training.warmup_cosine(1e-2, 100, warmup=10)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=mask),
    )
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(carry, count):
        (params, m, v), (their_params, state) = carry
        grads = random_like(params, jax.random.key(count))
        norm = ops.global_norm(grads, backend=backend)
        ours = ops.adamw_update(
            *(params, grads, m, v),
            step=count + 1,
            lr=schedule(count),
            mask=mask,
            grad_scale=jnp.minimum(1.0, 1.0 / norm),
            backend=backend,
        )
        updates, state = optimizer.update(grads, state, their_params)
        return (ours, (optax.apply_updates(their_params, updates), state)), None

    @jax.jit
    def run(params):
        start = ((params, zeros, zeros), (params, optimizer.init(params)))
        (ours, theirs), _ = jax.lax.scan(step, start, jnp.arange(100))
        difference = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), ours[0], theirs[0])
        moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), ours[0], params)
        return difference, moved

    return jax.tree.map(np.asarray, run(params))


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        pytest.param(CONFIG, "xla", id="small-xla"),
        pytest.param(gpt2.GPT2Config(), "cuda", marks=pytest.mark.gpu, id="124m-cuda"),
        pytest.param(gpt2.GPT2Config(), "pallas", marks=pytest.mark.gpu, id="124m-pallas"),
    ],
)
def test_100_steps_match_optax(config, backend):
    difference, moved = hundred_steps(config, backend)
    for path, most in jax.tree_util.tree_leaves_with_path(difference):
        assert most < 5e-6, jax.tree_util.keystr(path)
    for path, least in jax.tree_util.tree_leaves_with_path(moved):
        assert least > 1e-2, jax.tree_util.keystr(path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("copy_dtype", ["bfloat16", "float16"])
def test_low_precision_copy_is_the_rounded_parameter(backend, grad_dtype, copy_dtype):
    param, grad, m, v = fresh(0, 7, 123)
    grad = grad.astype(grad_dtype)
    new, *_, copy = ops.adamw_update(
        *(param, grad, m, v), step=2, lr=0.1, copy_dtype=copy_dtype, backend=backend
    )
    assert copy.dtype == copy_dtype
    np.testing.assert_array_equal(bits(copy), bits(new.astype(copy_dtype)))
    wide = ops.adamw_update(param, grad.astype("float32"), m, v, step=2, lr=0.1, backend="xla")
    testing.assert_close(new, wide[0], "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_stochastic_rounding_has_equal_bits_on_every_backend(backend, param_dtype):
    # With lr=0 only the rounding changes the parameters; a weight decay could differ by FMA
    # contraction. A bfloat16 parameter would round to itself, so its lr is not zero.
    tree = {"a": fresh(0, 33, 65), "b": fresh(1, 2050)}
    param, grad, m, v = ({name: x[i] for name, x in tree.items()} for i in range(4))
    exact = param_dtype == "float32"
    options = {"step": 3, "seed": 11, "copy_dtype": "bfloat16" if exact else None}
    param = jax.tree.map(lambda x: x.astype(param_dtype), param)

    def run(backend):
        lr = 0.0 if exact else 0.01
        out = ops.adamw_update(param, grad, m, v, lr=lr, **options, backend=backend)
        return out[3] if exact else out[0]

    for ours, theirs in zip(
        jax.tree.leaves(run(backend)), jax.tree.leaves(run("xla")), strict=True
    ):
        if exact:
            np.testing.assert_array_equal(bits(ours), bits(theirs))
        else:  # one ulp in float32 can change a rounding
            assert np.mean(bits(ours) != bits(theirs)) < 2e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_is_unbiased(backend):
    # 300/65536 of the way from one bfloat16 to the next.
    low, share = 1.0, 300 / 65536
    param = jnp.full((64, 1024), low + share / 128)
    zeros = jnp.zeros_like(param)
    update = functools.partial(
        ops.adamw_update, *(param, zeros, zeros, zeros), lr=0.0, copy_dtype="bfloat16"
    )

    def ups(**options):
        copy = np.asarray(update(**options, backend=backend)[3].astype(jnp.float32))
        assert set(np.unique(copy)) == {low, low + 1 / 128}
        return copy > low

    first = ups(step=1, seed=5)
    deviation = math.sqrt(share * (1 - share) / param.size)
    assert abs(first.mean() - share) < 4 * deviation
    np.testing.assert_array_equal(first, ups(step=1, seed=5))
    for other in (ups(step=2, seed=5), ups(step=1, seed=6)):
        both = (first & other).mean()  # independent: share squared
        assert abs(both - share**2) < 5 * share / math.sqrt(param.size)


def test_leaves_are_rounded_independently():
    param = jnp.full((4096,), 1.0 + 0.5 / 128)
    tree = {"a": param, "b": param}
    zeros = jax.tree.map(jnp.zeros_like, tree)
    copy = ops.adamw_update(
        *(tree, zeros, zeros, zeros), step=1, lr=0.0, seed=0, copy_dtype="bfloat16"
    )[3]
    assert 0.4 < np.mean(bits(copy["a"]) != bits(copy["b"])) < 0.6


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding_preserves_nonfinite_values(backend):
    # An update of one with lr=3e38 overflows 3e38 to infinity.
    param = jnp.array([jnp.nan, -jnp.nan, 3e38, -3e38, 0.0] * 200)
    param = param.at[0].set(jax.lax.bitcast_convert_type(jnp.uint32(0x7FFFFFFF), jnp.float32))
    grad = jnp.array([0.0, 0.0, -1.0, 1.0, 0.0] * 200)
    zeros = jnp.zeros_like(param)
    new, *_, copy = ops.adamw_update(
        *(param, grad, zeros, zeros),
        step=1,
        lr=3e38,
        seed=0,
        weight_decay=0.0,
        copy_dtype="bfloat16",
        backend=backend,
    )
    np.testing.assert_array_equal(new[:5], [jnp.nan, jnp.nan, jnp.inf, -jnp.inf, 0.0])
    np.testing.assert_array_equal(np.asarray(copy, "float32"), np.asarray(new))


def test_random_bits_are_uniform():
    values = np.asarray(reference._random_bits((1000, 64), jnp.uint32(3)))
    assert len(np.unique(values)) == values.size  # the hash is a bijection
    for bit in range(32):
        assert abs(np.mean(values >> bit & 1) - 0.5) < 5 / 2 / math.sqrt(values.size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scalars_may_be_traced(backend):
    param, grad, m, v = fresh(0, 5, 33)
    traces = []

    @jax.jit
    def update(step, lr, grad_scale, seed):
        traces.append(step)
        return ops.adamw_update(
            *(param, grad, m, v),
            step=step,
            lr=lr,
            grad_scale=grad_scale,
            seed=seed,
            copy_dtype="bfloat16",
            backend=backend,
        )

    for step, lr, scale in ((1, 1e-1, 1.0), (7, 1e-2, 0.5)):
        actual = update(step, lr, scale, step)
        expected = ops.adamw_update(
            param, grad * scale, m, v, step=step, lr=lr, weight_decay=0.1, backend="xla"
        )
        testing.assert_close(actual[:3], expected, "float32")
    assert len(traces) == 1


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hyperparameters_may_be_traced(backend, dtype):
    param, grad, m, v = fresh(0, 5, 33, dtype=dtype)
    trees = [{"a": x, "b": x[0]} for x in (param, grad, m, v)]
    numbers = {"b1": 0.8, "b2": 0.99, "eps": 1e-3, "weight_decay": 0.3}

    def update(numbers):
        return ops.adamw_update(
            *trees, step=3, lr=0.1, mask={"a": True, "b": False}, **numbers, backend=backend
        )

    traces = jax.jit(update)
    for factor in (1, 0.9):
        these = {name: factor * value for name, value in numbers.items()}
        for found, wanted in zip(traces(these), update(these), strict=True):
            jax.tree.map(lambda x, y: testing.assert_close(x, y, x.dtype), found, wanted)
    with pytest.raises(ValueError, match=r"eps has shape \(2,\); it must be a scalar"):
        jax.eval_shape(update, numbers | {"eps": jnp.ones(2)})


def test_cuda_kernel_rejects_traced_hyperparameters():
    leaf = (jnp.ones(3),)
    why = cuda.adamw_update_unsupported(leaf, leaf, leaf, leaf, jnp.ones(5), None, jnp.ones(4))
    assert why == "b1, b2, eps or weight_decay is traced; the kernel takes numbers"
    assert not cuda.adamw_update_unsupported(leaf, leaf, leaf, leaf, jnp.ones(5), None, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_of_mixed_dtypes_matches_separate_leaves(backend):
    leaves = {
        "a": fresh(0, 9, 17),
        "b": fresh(1, 40, dtype="bfloat16"),
        "c": fresh(2, 3, 5, dtype="float16"),
        "d": fresh(3, 8),
    }
    trees = [{name: x[i] for name, x in leaves.items()} for i in range(4)]
    trees[1]["d"] = trees[1]["d"].astype("bfloat16")
    together = ops.adamw_update(*trees, step=2, lr=0.1, backend=backend)
    for name in leaves:
        alone = ops.adamw_update(*(tree[name] for tree in trees), step=2, lr=0.1, backend="xla")
        testing.assert_close([tree[name] for tree in together], alone, alone[0].dtype, what=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", [None, 3])
def test_skipped_step_changes_no_bits(backend, dtype, seed):
    if seed is not None and dtype == "float16":
        return  # stochastic rounding needs bfloat16
    copy: Any = {"copy_dtype": "bfloat16"} if dtype == "float32" else {}
    old = [jnp.concatenate([x.ravel(), x.ravel()[:5]]) for x in fresh(0, 3, 171, dtype=dtype)]
    param, grad, m, v = old
    for value in (jnp.nan, jnp.inf):
        new = ops.adamw_update(
            *(param, grad.at[::7].set(value).astype(dtype), m, v),
            step=3,
            lr=0.1,
            grad_scale=value,
            skip=jnp.array(True),
            seed=seed,
            backend=backend,
            **copy,
        )
        for found, wanted in zip(new[:3], (param, m, v), strict=True):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
        if copy and seed is None:
            np.testing.assert_array_equal(bits(new[3]), bits(param.astype("bfloat16")))


def test_weight_decay_applies_only_to_masked_leaves():
    tree = {"a": jnp.ones(3), "b": jnp.ones(3)}
    zeros = jax.tree.map(jnp.zeros_like, tree)
    mask = {"a": True, "b": False}
    new = ops.adamw_update(
        *(tree, zeros, zeros, zeros), step=1, lr=0.5, weight_decay=0.1, mask=mask
    )[0]
    np.testing.assert_allclose(new["a"], 0.95, rtol=1e-6)
    np.testing.assert_array_equal(new["b"], 1.0)
    nested = {"a": tree, "b": tree}
    new = ops.adamw_update(
        *(nested, *[jax.tree.map(jnp.zeros_like, nested)] * 3),
        step=1,
        lr=0.5,
        weight_decay=0.1,
        mask={"a": np.False_, "b": True},  # a prefix
    )[0]
    assert new["a"]["b"][0] == 1 and new["b"]["a"][0] < 1


def test_custom_call_aliases_its_operands():
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    tree = {"a": jnp.ones((4, 5)), "b": jnp.ones(3)}
    program = testing.lower_for_cuda(
        functools.partial(ops.adamw_update, step=1, lr=0.1, backend="cuda"), *[tree] * 4
    )
    assert program.count("@jaxllm_adamw_update") == 1  # one launch for the tree
    aliases = program.count("operand_index")
    assert aliases == 6
    # Operand 0 holds the scalars; two params, two grads, two ms and two vs follow.
    for operand in (1, 2, 5, 6, 7, 8):
        assert f"operand_index = {operand}," in program


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_donated_buffers_are_reused(backend):
    tree = {"a": jnp.ones((1000, 77)), "b": jnp.ones(3000)}
    param, grad, m, v = (jax.tree.map(jnp.copy, tree) for _ in range(4))
    update = jax.jit(
        functools.partial(ops.adamw_update, step=1, lr=0.1, backend=backend),
        donate_argnums=(0, 2, 3),
    )

    def pointers(trees):
        return sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees))

    before = pointers((param, m, v))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((param, m, v)))
    compiled = update.lower(param, grad, m, v).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < 10_000  # nothing is copied
    assert pointers(update(param, grad, m, v)) == before


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
def test_operands_are_unchanged_without_donation(backend):
    param, grad, m, v = fresh(0, 100, 77)
    before = [np.array(x) for x in (param, m, v)]
    ops.adamw_update(param, grad, m, v, step=1, lr=0.1, backend=backend)
    for x, old in zip((param, m, v), before, strict=True):
        np.testing.assert_array_equal(x, old)


@pytest.mark.gpu
def test_more_leaves_than_fit_one_launch():
    leaves = {f"{i:03}": fresh(i, i % 8, 7) for i in range(150)}  # every eighth is empty
    trees = [{name: x[i] for name, x in leaves.items()} for i in range(4)]
    mask = {name: int(name) % 2 == 0 for name in leaves}
    update = functools.partial(
        ops.adamw_update, step=2, lr=0.1, mask=mask, copy_dtype="bfloat16", seed=0
    )
    actual = update(*trees, backend="cuda")
    testing.assert_close(actual[:3], update(*trees, backend="xla")[:3], "float32")
    jax.tree.map(lambda c, p: testing.assert_close(c, p, "bfloat16"), actual[3], actual[0])
    norms = [ops.global_norm(trees[1], backend=backend) for backend in ("cuda", "xla")]
    np.testing.assert_allclose(*norms, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
def test_more_than_2_to_the_31_elements():
    size = 2**31 + 2**20 + 3
    places = (0, 1, 2**31 - 1, 2**31, 2**31 + 12345, size - 1)

    @jax.jit
    def pick(x):  # static slices: these indices exceed int32
        return jnp.concatenate([jax.lax.slice(x, (i,), (i + 1,)) for i in places])

    make = jax.jit(lambda value, dtype: jnp.full(size, value, dtype), static_argnums=(0, 1))
    param, grad = make(1.0, "bfloat16"), make(0.5, "bfloat16")
    norm = ops.global_norm([grad], backend="cuda")
    np.testing.assert_allclose(norm, 0.5 * math.sqrt(size), rtol=1e-5)
    m, v = make(0.25, "float32"), make(1.0, "float32")
    small = [pick(x) for x in (param, grad, m, v)]
    options = {"step": 2, "lr": 0.1}
    update = jax.jit(
        functools.partial(ops.adamw_update, **options, backend="cuda"), donate_argnums=(0, 2, 3)
    )
    actual = update(param, grad, m, v)
    expected = ops.adamw_update(*small, **options, backend="xla")
    for big, few in zip(actual, expected, strict=True):
        testing.assert_close(pick(big), few, few.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_norm_of_huge_and_nonfinite_values(backend):
    norm = functools.partial(ops.global_norm, backend=backend)
    np.testing.assert_allclose(norm([jnp.full(100, 1e18)]), 1e19, rtol=1e-6)
    assert norm([jnp.full(1000, 1e19)]) == np.inf
    assert norm([jnp.array([1.0, -np.inf])]) == np.inf
    assert np.isnan(norm([jnp.array([1.0, np.nan])]))
    half = jnp.full(4096, 6e4, jnp.float16)  # beyond float16 when squared
    np.testing.assert_allclose(norm([half]), 64 * np.float32(half[0]), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_norm_of_mixed_dtypes_is_float32(backend):
    tree = {"a": jnp.full((3, 3), 2.0), "b": (jnp.ones(4, jnp.bfloat16), jnp.zeros((0, 2)))}
    tree["c"] = jnp.full(1, 3.0, jnp.float16)
    norm = ops.global_norm(tree, backend=backend)
    np.testing.assert_allclose(norm, 7.0, rtol=1e-6)
    assert norm.dtype == jnp.float32 and norm.shape == ()


def test_global_norm_of_an_empty_tree_is_zero():
    assert ops.global_norm({}) == 0


def test_explain_shows_the_first_leaf_and_the_count_of_others():
    tree = {"a": jnp.ones((4, 5)), "b": jnp.ones(3), "c": jnp.ones(3, jnp.bfloat16)}
    (call,) = jaxllm.explain(ops.global_norm, tree).calls
    assert (call.stem, call.shapes) == ("global_norm", "f32[4,5]+2")


def test_update_of_an_empty_tree_is_empty():
    assert ops.adamw_update({}, {}, {}, {}, step=1, lr=0.1) == ({}, {}, {})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad": jnp.ones(4)}, ValueError, r"grad has shape \(4,\); it must be \(3,\)"),
        ({"grad": {"a": jnp.ones(3)}}, ValueError, "grad has the structure"),
        ({"mask": {"a": True}}, ValueError, "mask has the structure"),
        ({"mask": np.ones(2)}, TypeError, r"mask has array\(.*\); it must be a bool"),
        (
            {name: {"w": jnp.ones(3)} for name in ("param", "m", "v")}
            | {"grad": {"x": jnp.ones(3)}},
            ValueError,
            "grad differs from param in structure: w is missing; x is unexpected",
        ),
        (
            {name: {"w": [jnp.ones(3)]} for name in ("param", "m", "v")}
            | {"grad": {"w": [jnp.ones(4)]}},
            ValueError,
            r"grad/w/0 has shape \(4,\); it must be \(3,\), the shape of param/w/0",
        ),
        ({"param": jnp.ones(3, jnp.int32)}, TypeError, "param has dtype int32"),
        ({"m": jnp.ones(3, jnp.bfloat16)}, TypeError, "m has dtype bfloat16; it must be float32"),
        ({"v": jnp.ones(3, jnp.float16)}, TypeError, "v has dtype float16; it must be float32"),
        ({"b1": 1.0}, ValueError, "b1 is 1.0; it must have 0 <= b1 < 1"),
        ({"b2": -0.1}, ValueError, "b2 is -0.1"),
        ({"step": 0}, ValueError, "step is 0; it must be at least 1"),
        ({"step": None}, TypeError, "step has type NoneType"),
        ({"step": np.ones(1)}, ValueError, r"step has shape \(1,\); it must be a scalar"),
        ({"grad_scale": jnp.ones(1)}, ValueError, r"grad_scale has shape \(1,\)"),
        ({"grad_scale": "1"}, TypeError, "grad_scale has type str"),
        ({"skip": jnp.ones(1, bool)}, ValueError, r"skip has shape \(1,\); it must be a scalar"),
        ({"lr": np.nan}, ValueError, "lr is nan; it must be finite"),
        ({"lr": "0.1"}, TypeError, r"lr is '0\.1'; it must be a number"),
        ({"eps": -1e-8}, ValueError, "eps is -1e-08; it must be finite and at least 0"),
        ({"weight_decay": np.inf}, ValueError, "weight_decay is inf; it must be finite and at"),
        ({"copy_dtype": "float32"}, TypeError, "copy_dtype is float32"),
        ({"copy_dtype": "b16"}, TypeError, "copy_dtype is 'b16'; it must be a dtype"),
        ({"seed": np.ones(2, int), "copy_dtype": "bfloat16"}, ValueError, r"seed has shape \(2,\)"),
        (
            {"param": jnp.ones(3, jnp.bfloat16), "copy_dtype": "bfloat16"},
            TypeError,
            "with a copy_dtype it must be float32",
        ),
        ({"seed": 0}, TypeError, "with a seed one of them must be bfloat16"),
        ({"seed": 0.5, "copy_dtype": "bfloat16"}, TypeError, "seed is 0.5; it must be an integer"),
        ({"seed": "3", "copy_dtype": "bfloat16"}, TypeError, "seed has type str; it must be an"),
        ({"seed": 2**70, "copy_dtype": "bfloat16"}, ValueError, "seed has an integer that is bey"),
        ({"seed": 0, "copy_dtype": "float16"}, TypeError, "with a seed one of them"),
        ({"backend": "nothing"}, ValueError, "backend is 'nothing'"),
    ],
)
def test_invalid_arguments_are_rejected(change, error, message):
    arguments = dict.fromkeys(("param", "grad", "m", "v"), jnp.ones(3)) | {"step": 1, "lr": 0.1}
    with pytest.raises(error, match=message):
        ops.adamw_update(**(arguments | change))


def test_global_norm_rejects_integers():
    with pytest.raises(TypeError, match="tree has dtype int32"):
        ops.global_norm({"a": jnp.ones(3, jnp.int32)})


@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_moments_stay_float32_under_x64(backend):
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float32)
        outputs = ops.adamw_update(x, x, x, x, step=1, lr=0.1, backend=backend)
    assert [output.dtype for output in outputs] == [jnp.float32] * 3


def test_pallas_rejects_float64():
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float64)
        with pytest.raises(jaxllm.BackendError, match="m has dtype float64"):
            ops.adamw_update(x, x, x, x, step=1, lr=0.1, backend="pallas")
        with pytest.raises(jaxllm.BackendError, match="tree has dtype float64"):
            ops.global_norm([x], backend="pallas")
