"""Ops in a ``jax.shard_map`` of the user's, over all axes of a mesh and over some."""

import functools

import jax
import pytest
from calls import ALL, CALLS, is_floating, make_mesh, on_one_device, put
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_transforms import FEW, gradients, loss_of

from jaxllm import testing

SUMS = {str(call): call for call in CALLS if str(call) in (*FEW, "cross_entropy-sum")}
# The mean over the rows of a shard is none of the mean over all.
del SUMS["linear_cross_entropy"]
# The table of the LM head is no term of a sum over the shards.
del SUMS["tied_embed"]
KINDS = ("Auto", "Explicit")


def sums(call, axes, is_typed, arrays, specs):
    """In a shard_map: the loss and the gradients, summed over the shards."""
    loss, of_arrays = gradients(loss_of(call), arrays)
    if not is_typed:  # else JAX sums the gradients of what all shards share
        of_arrays = {
            name: x if any(specs[name]) else jax.lax.psum(x, axes) for name, x in of_arrays.items()
        }
    return jax.lax.psum(loss, axes), of_arrays


@functools.cache
def wanted(name):
    call = SUMS[name]
    return on_one_device(lambda arrays: gradients(loss_of(call, "xla"), arrays), call.arrays())


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.covering(("name",), ("check_vma",))
def test_manual_axes_match_one_device(name, check_vma):
    call, arrays, mesh = SUMS[name], SUMS[name].arrays(), make_mesh("Auto")
    specs = call.specs({"B": ALL})
    mapped = jax.shard_map(
        lambda arrays: sums(call, ALL, check_vma, arrays, specs),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(), {name: specs[name] for name, x in arrays.items() if is_floating(x)}),
        check_vma=check_vma,
    )
    found = jax.jit(mapped)(put(mesh, arrays, specs))
    testing.assert_close(jax.device_get(found), wanted(name), "float32", what=name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.covering(("name", "kind"), ("name", "check_vma"), ("kind", "check_vma"))
def test_partly_manual_axes_match_one_device(name, kind, check_vma):
    call, arrays, mesh = SUMS[name], SUMS[name].arrays(), make_mesh(kind)
    specs, manual = (call.specs({"B": axes}) for axes in (ALL, "a"))
    mapped = jax.shard_map(
        lambda arrays: sums(call, "a", check_vma, arrays, manual),
        mesh=mesh,
        in_specs=(manual,),
        out_specs=(P(), {name: manual[name] for name, x in arrays.items() if is_floating(x)}),
        axis_names=frozenset("a"),
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(put(mesh, arrays, specs))
    testing.assert_close(jax.device_get(found), wanted(name), "float32", what=name)


@pytest.mark.parametrize("name", SUMS)
def test_explicit_and_auto_axes_match_one_device(name):
    call, arrays = SUMS[name], SUMS[name].arrays()
    mesh = jax.make_mesh((2, 4), ALL, axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh):
        given = put(mesh, arrays, call.specs({"B": ALL}))
        found = jax.jit(lambda arrays: gradients(loss_of(call), arrays))(given)
    testing.assert_close(jax.device_get(found), wanted(name), "float32", what=name)
