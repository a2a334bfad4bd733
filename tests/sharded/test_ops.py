"""Every op on sharded arrays against the same call on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    ALL,
    CALLS,
    collectives,
    expected,
    make_mesh,
    on_one_device,
    put,
    same_shardings,
    value_and_gradients,
)
from jax.sharding import PartitionSpec as P

from jaxllm import ops, testing
from jaxllm.core import shards
from jaxllm.ops.block import residual

KINDS = ("Auto", "Explicit")


def watch_assignments(monkeypatch, op):
    """The names along which the arrays of an op may be sharded, and those along which they are."""
    possible, used = set(), set()
    assign = shards.Layout.assign

    def watched(layout, *args):
        axes = assign(layout, *args)
        if layout.call.name == op:
            names = {name.rstrip("'") for of_array in layout.operands for name in of_array}
            possible.update(names & layout.shardable)
            used.update(axes)
        return axes

    monkeypatch.setattr(shards.Layout, "assign", watched)
    return possible, used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [call for call in CALLS if call.sharded], ids=str)
@pytest.mark.covering(("call",), ("op", "kind"))
def test_declared_shardings_match_one_device_without_gathers(call, kind, monkeypatch):
    possible, used = watch_assignments(monkeypatch, call.op)
    mesh, arrays = make_mesh(kind), call.arrays()
    shardings = call.shardings()
    variants = {(name, "auto"): specs for name, specs in shardings.items()}
    last = list(shardings)[-1]
    variants |= {(last, backend): shardings[last] for backend in call.backends}
    given = {key: put(mesh, arrays, specs) for key, specs in variants.items()}
    out_shardings = {
        key: (None, same_shardings(mesh, arrays, specs) if call.has_backward else {})
        for key, specs in variants.items()
    }

    def run(given):
        return {
            key: value_and_gradients(call, key[1], of_variant) for key, of_variant in given.items()
        }

    # On Explicit axes the gradients have the shardings that the types of their arguments have.
    to_run = jax.jit(run, out_shardings=out_shardings if kind == "Auto" else None)
    program = to_run.lower(given).compile()
    found = program(given)
    for key, actual in found.items():
        testing.assert_close(
            jax.device_get(actual), expected(call), call.dtype, what=f"{call} {key}"
        )
        for name, gradient in actual[1].items():
            want = given[key][name].sharding
            assert gradient.sharding.is_equivalent_to(want, gradient.ndim), (key, name)
    # A bfloat16 call repeats some of the shardings of a float32 one.
    assert used == possible or (call.dtype == "bfloat16" and used < possible)
    of_call = collectives(program)
    weights = {arrays[name].size for name in call.weights}
    moved = [(k, size) for k, size in of_call if k not in ("all-reduce", "reduce-scatter")]
    moved = [pair for pair in moved if not call.is_moved_in_context(*pair)]
    assert all(k == "all-gather" and size in weights for k, size in moved), moved
    if call.weights and call.has_backward:
        # The gradient of each weight is summed in shards.
        scattered = [size for k, size in of_call if k == "reduce-scatter"]
        assert set(scattered) >= {size // len(jax.devices()) for size in weights}, scattered


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_without_gradients_match_one_device_under_fsdp(kind):
    mesh = make_mesh(kind)
    calls = {str(call): call for call in CALLS if call.weights and call.dtype == "float32"}
    given = {name: put(mesh, call.arrays(), call.fsdp()) for name, call in calls.items()}
    run = jax.jit(lambda given: {name: calls[name](x, "auto") for name, x in given.items()})
    for name, actual in run(given).items():
        testing.assert_close(
            jax.device_get(actual), expected(calls[name])[0], calls[name].dtype, what=name
        )


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.filterwarnings("ignore:.* gathers operand")  # the gradient of the output
def test_one_key_head_in_parts_is_whole_where_the_output_is_sharded():
    sinks = jnp.zeros(8)
    calls = {
        "attention": lambda qkv: ops.flash_attention_packed(qkv, 8, 1),
        "sinks": lambda qkv: ops.flash_attention_packed(qkv, 8, 1, sinks=sinks),
        "repeat_kv": lambda qkv: ops.repeat_kv(qkv[:, :, 0], 8).reshape(*qkv.shape[:2], 32),
    }
    arrays = {"qkv": normal(2, 4, 10, 1, 4), "weight": normal(32, 8)}

    def loss(arrays, call):
        return jnp.sum(jnp.square(calls[call](arrays["qkv"]) @ arrays["weight"]))

    def run(arrays):
        return {call: jax.value_and_grad(loss)(arrays, call) for call in calls}

    # XLA shards the output as the rows of the weight.
    given = put(make_mesh("Auto"), arrays, {"qkv": P(), "weight": P(ALL)})
    found = jax.jit(run)(given)
    testing.assert_close(jax.device_get(found), on_one_device(run, arrays), "float32")


def test_residual_adds_a_bias_that_is_sharded_as_the_rows():
    mesh, arrays = make_mesh("Explicit"), {"x": normal(8, 4, 16), "bias": normal(16)}

    def loss(arrays):
        h = ops.residual(arrays["x"])
        h = residual.carry(h, h.x, branch=(2 * h.x, arrays["bias"]))
        return jnp.sum(jnp.square(h.x))

    run = jax.value_and_grad(loss)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(put(mesh, arrays, {"x": P(ALL), "bias": P(ALL)}))
    assert found[1]["bias"].sharding.spec == P(ALL)
    testing.assert_close(jax.device_get(found), on_one_device(run, arrays), "float32")
