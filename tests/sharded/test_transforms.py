"""Ops on sharded arrays under the transformations of JAX."""

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    ALL,
    CALLS,
    is_floating,
    make_mesh,
    on_one_device,
    put,
)
from jax.sharding import PartitionSpec as P

from jaxllm import ops, testing
from jaxllm.core.backend import BackendError

KINDS = ("Auto", "Explicit")
FEW = {
    str(call): call
    for call in CALLS
    if str(call)
    in (
        "layer_norm",
        "linear",
        "flash_attention",
        "mlp",
        "linear_cross_entropy",
        "tied_embed",
        "attention_block-fused",
        "ffn_block",
    )
}


def loss_of(call, backend="auto"):
    """A scalar that depends on all outputs, as a function of the arrays."""

    def loss(arrays):
        out = call(arrays, backend)
        return sum(jnp.sum(x * x) if x.ndim else x for x in jax.tree.leaves(out))

    return loss


def gradients(loss, arrays):
    """The loss, and its gradients by the floating arrays."""
    fixed = {name: x for name, x in arrays.items() if not is_floating(x)}
    some = {name: x for name, x in arrays.items() if name not in fixed}
    return jax.value_and_grad(lambda some: loss(some | fixed))(some)


@functools.cache
def wanted(name):
    """The loss and the gradients on one device."""
    call = FEW[name]
    return on_one_device(lambda arrays: gradients(loss_of(call, "xla"), arrays), call.arrays())


def scanned(loss, arrays):
    """The mean of three losses."""

    def body(total, _):
        return total + jax.checkpoint(loss)(arrays), None

    return jax.lax.scan(body, jnp.zeros(()), length=3)[0] / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FEW)
@pytest.mark.covering(("name",), ("kind",))
def test_scan_and_checkpoint_change_no_results(name, kind):
    call, mesh = FEW[name], make_mesh(kind)
    policy = jax.checkpoint_policies.save_only_these_names(call.op, "linear", "flash_attention")
    losses = {
        "checkpoint in scan": functools.partial(scanned, loss_of(call)),
        "policy": jax.checkpoint(loss_of(call), policy=policy),
    }
    given = put(mesh, call.arrays(), call.fsdp())

    @jax.jit
    def run(arrays):
        return {name: gradients(loss, arrays) for name, loss in losses.items()}

    # A program of arrays on Auto axes needs no mesh in its context.
    with jax.set_mesh(mesh) if kind == "Explicit" else contextlib.nullcontext():
        found = run(given)
    for variant, actual in found.items():
        testing.assert_close(jax.device_get(actual), wanted(name), "float32", what=variant)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", FEW.values(), ids=str)
@pytest.mark.covering(("call",), ("kind",))
def test_vmap_matches_a_loop(call, kind):
    mesh = make_mesh(kind)
    arrays = call.arrays()
    factors = np.linspace(0.75, 1.25, 8, dtype=np.float32)
    stacked = {
        name: np.stack([x * i for i in factors]).astype(x.dtype)
        if is_floating(x)
        else np.stack([x] * 8)
        for name, x in arrays.items()
    }
    first = next(name for name, x in arrays.items() if is_floating(x))
    loss = loss_of(call, "xla")
    wanted_all = on_one_device(jax.vmap(lambda x: gradients(loss, x)), stacked)
    in_axes = {name: 0 if name == first else None for name in arrays}
    mixed = {name: stacked[name] if name == first else x for name, x in arrays.items()}
    wanted_first = on_one_device(jax.vmap(lambda x: gradients(loss, x), in_axes=(in_axes,)), mixed)
    specs = call.specs({call.sharded.split()[0]: ALL})
    of_mapped = {name: P(ALL) for name in specs}
    of_both = {
        name: P("a", *("b" if entry == ALL else None for entry in spec))
        for name, spec in specs.items()
    }
    variants = {
        "mapped": (None, put(mesh, stacked, of_mapped)),
        "both": (None, put(mesh, stacked, of_both)),
        "first": (in_axes, put(mesh, mixed, specs | {first: P(None, *specs[first])})),
    }

    @jax.jit
    def run(given):
        return {
            name: jax.vmap(
                lambda x: gradients(loss_of(call), x), in_axes=(variants[name][0] or 0,)
            )(x)
            for name, x in given.items()
        }

    with jax.set_mesh(mesh):
        found = run({name: given for name, (_, given) in variants.items()})
    for name, actual in found.items():
        wanted = wanted_first if name == "first" else wanted_all
        testing.assert_close(jax.device_get(actual), wanted, "float32", what=f"{call} {name}")


@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_gradients_match_one_device_where_only_scales_in_shards_are_mapped(backend):
    # The second output, x + x, depends on nothing that is mapped.
    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((6, 8)), "scale": rng.standard_normal((8, 8))}
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}

    def loss(arrays):
        x, scale = arrays["x"], arrays["scale"]
        out, h = ops.add_rms_norm(x, x, scale, backend=backend)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(h))

    def run(arrays):
        of_each = jax.vmap(loss, ({"x": None, "scale": 0},))
        return jax.value_and_grad(lambda arrays: of_each(arrays).sum())(arrays)

    mesh = make_mesh("Explicit")
    given = put(mesh, arrays, {"x": P(), "scale": P(ALL)})
    with jax.set_mesh(mesh):
        found = jax.jit(run)(given)
    testing.assert_close(jax.device_get(found), on_one_device(run, arrays), "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_one_output_match_one_device(kind):
    mesh = make_mesh(kind)
    names = ("tied_embed", "add_layer_norm", "add_rms_norm", "rope")
    calls = {str(call): call for call in CALLS if str(call) in names}
    assert len(calls) == len(names)

    def run(given, backend):
        def loss(i, call, arrays):
            return jnp.sum(call(arrays, backend)[i] ** 2)

        return {
            (name, i): gradients(functools.partial(loss, i, calls[name]), arrays)
            for name, arrays in given.items()
            for i in range(2)
        }

    arrays = {name: call.arrays() for name, call in calls.items()}
    given = {name: put(mesh, arrays[name], call.specs({"B": ALL})) for name, call in calls.items()}
    with jax.set_mesh(mesh):
        found = jax.jit(lambda given: run(given, "auto"))(given)
    expected = on_one_device(lambda given: run(given, "xla"), arrays)
    for key, actual in found.items():
        testing.assert_close(jax.device_get(actual), expected[key], "float32", what=str(key))


@pytest.mark.parametrize("kind", KINDS)
def test_forward_mode_matches_one_device_under_xla_alone(kind):
    mesh = make_mesh(kind)
    calls = [FEW["layer_norm"], FEW["linear"], FEW["flash_attention"]]

    def run(given, backend):
        return [
            jax.jvp(lambda arrays, call=call: call(arrays, backend), (arrays,), (arrays,))
            for call, arrays in zip(calls, given, strict=True)
        ]

    arrays = [call.arrays() for call in calls]
    given = [put(mesh, x, call.specs({"B": ALL})) for x, call in zip(arrays, calls, strict=True)]
    with jax.set_mesh(mesh):
        found = jax.jit(lambda given: run(given, "xla"))(given)
        with pytest.raises(BackendError, match="forward mode"):
            jax.jit(lambda given: run(given, "auto"))(given)
    expected = on_one_device(lambda given: run(given, "xla"), arrays)
    testing.assert_close(jax.device_get(found), expected, "float32")


def test_a_program_of_a_symbolic_batch_is_exported_for_one_device():
    def gradients(x, scale):
        return jax.grad(lambda *of: jnp.sum(ops.rms_norm(*of) ** 2), (0, 1))(x, scale)

    (rows,) = jax.export.symbolic_shape("rows")
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 8), (8,))]
    exported = jax.export.export(jax.jit(gradients))(*like)
    assert exported.nr_devices == 1 < jax.device_count()
    x, scale = jnp.arange(24.0).reshape(3, 8), jnp.ones(8)
    testing.assert_close(exported.call(x, scale), gradients(x, scale), "float32")
