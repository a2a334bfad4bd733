"""What an op gathers, and how it tells."""

import importlib
import pkgutil
import warnings

import jax
import pytest
from calls import (
    ALL,
    CALLS,
    expected,
    make_mesh,
    put,
    value_and_gradients,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxllm.ops
from jaxllm import testing
from jaxllm.core import gathers, partition
from jaxllm.core.dispatch import Op
from jaxllm.core.gathers import GatherWarning
from jaxllm.ops.block.residual import carry

KINDS = ("Auto", "Explicit")
UNDECLARED = {str(call): call for call in CALLS if call.undeclared is not None}


def run_recorded(run, given):
    """The compiled program, and the warnings of making it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        program = jax.jit(run).lower(given).compile()
    assert all(issubclass(x.category, GatherWarning) for x in seen), list(map(str, seen))
    return program, [str(x.message) for x in seen]


def given_to_each(mesh):
    return {name: put(mesh, c.arrays(), c.gathered()) for name, c in UNDECLARED.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_other_shardings_are_gathered_with_one_warning(kind):
    def run(given):
        return {name: UNDECLARED[name](arrays, "auto") for name, arrays in given.items()}

    _, messages = run_recorded(run, given_to_each(make_mesh(kind)))
    found = sorted(message.partition(":")[0] for message in messages)
    wanted = [
        f"{call.runs or call.op} gathers operand {list(call.inputs).index(array)}, whose "
        f"sharding is {call.gathered()[array]}"
        for call in UNDECLARED.values()
        for array, _ in filter(None, [call.undeclared])
    ]
    assert found == sorted(wanted)


def alternately(call):
    """The sharding of every second array, or None where there is none."""
    name, *_ = call.sharded.split() or [None]
    specs = call.specs({name: ALL})
    some = {array: specs[array] if i % 2 else P() for i, array in enumerate(specs)}
    return some if any(ALL in spec for spec in some.values()) else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["undeclared", "of_every_second_array"])
@pytest.mark.filterwarnings("ignore::jaxllm.core.gathers.GatherWarning")
@pytest.mark.covering(("which",), ("kind",))
def test_any_sharding_matches_one_device(which, kind):
    if which == "undeclared":
        specs = {name: call.gathered() for name, call in UNDECLARED.items()}
    else:
        specs = {str(call): alternately(call) for call in CALLS}
    specs = {name: of_call for name, of_call in specs.items() if of_call is not None}
    calls = {str(call): call for call in CALLS if str(call) in specs}
    mesh = make_mesh(kind)
    given = {name: put(mesh, call.arrays(), specs[name]) for name, call in calls.items()}

    @jax.jit
    def run(given):
        return {n: value_and_gradients(calls[n], "auto", arrays) for n, arrays in given.items()}

    for name, found in run(given).items():
        call = calls[name]
        testing.assert_close(jax.device_get(found), expected(call), call.dtype, what=name)


# Ops that each device computes of whole arrays, each with the reason.
WHOLE = {
    "nms": "each box is compared with all others",
}
# Ops that other ops call: they run on the shards of those.
_OF_LAYERS = "in linear, matmul, mlp, self_attention and the fused blocks, on their shards"
_OF_LOSSES = "in the forward of a loss, on its shards"
INSIDE = {
    "cross_entropy_with_gradient": _OF_LOSSES,
    "linear_cross_entropy_with_gradients": _OF_LOSSES,
} | dict.fromkeys(
    (
        "float8_matmul_amax",
        "float8_matmul_dgelu",
        "float8_matmul_dswiglu",
        "float8_norm",
        "float8_rope_backward",
        "float8_scale_and_round",
        "float8_round",
        "float8_gelu",
        "float8_swiglu",
        "fold_norm",
        "fold_norm_backward",
        "matmul_bias",
        "matmul_bias_gelu",
        "matmul_delta",
        "matmul_dgelu",
        "matmul_norm_backward",
        "matmul_residual",
        "matmul_residual_norm",
        "wgrad_pair",
    ),
    _OF_LAYERS,
)


def modules():
    for info in pkgutil.walk_packages(jaxllm.ops.__path__, "jaxllm.ops."):
        yield importlib.import_module(info.name)


def test_every_op_with_contract_cases_is_called_here():
    cases = [case for module in modules() for case in getattr(module, "CASES", ())]
    assert {case.op for case in cases} <= {call.op for call in CALLS}


def test_every_op_declares_shardings_or_has_a_reason(monkeypatch):
    rules = {}

    def recording(original):
        def call(function, name, rule, *args, **options):
            rules.setdefault(name, []).append(rule)
            return original(function, name, rule, *args, **options)

        return call

    for name in ("forward", "run"):
        monkeypatch.setattr(partition, name, recording(getattr(partition, name)))
    for call in CALLS:
        jax.eval_shape(lambda x, call=call: call(x, "auto"), call.arrays())
    whole = {name for name, of_op in rules.items() if not all(rule.shardable for rule in of_op)}
    assert whole == set(WHOLE)
    ops = {x.name for module in modules() for x in vars(module).values() if isinstance(x, Op)}
    assert ops - rules.keys() == set(INSIDE)


def test_gathers_of_the_backward_wait_for_an_op_before_that_is_small_or_next():
    large = gathers._AHEAD_BYTES

    def run(x):
        small, more, big, last, after = (x + i for i in range(5))
        assert gathers._ahead(small, 1) is small
        assert gathers._ahead(more, 1) is small
        assert gathers._ahead(big, large) is more
        assert gathers._ahead(last, 1) is big
        assert gathers._ahead(after, 1) is last
        inner = []

        def body(carry, _):
            inner.append(gathers._ahead(carry, 1) is carry)
            return carry, None

        jax.lax.scan(body, after, length=2)
        assert all(inner)
        return x

    jax.jit(run)(1.0)
    # A value of another program is not used.
    assert jax.jit(lambda x: x + (gathers._ahead(x, 1) is x))(1.0) == 2


def test_a_residual_has_its_own_sharding_whatever_that_of_its_branch():
    mesh = make_mesh("Explicit")
    h = jax.ShapeDtypeStruct((8, 16, 32), "bfloat16", sharding=NamedSharding(mesh, P("a")))
    branch = h.update(sharding=NamedSharding(mesh, P(None, None, "b")))

    def run(h, branch):
        residual = carry(jaxllm.ops.residual(h), h, branch=(branch, None))
        return residual.x, residual.add(branch).x

    with jax.set_mesh(mesh), pytest.warns(GatherWarning, match="residual gathers operand 1"):
        found = jax.eval_shape(run, h, branch)
    assert [x.sharding.spec for x in found] == [P("a", None, None)] * 2
