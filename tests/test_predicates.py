"""Every direction of every op has predicates made for its own arrays."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import jaxllm
import jaxllm.ops
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.dispatch import Direction, Op, predicate
from jaxllm.models import gpt2

FAMILIES = [module.name for module in pkgutil.iter_modules(jaxllm.ops.__path__) if module.ispkg]
MODULES = [
    importlib.import_module(f"jaxllm.ops.{family}.{info.name}")
    for family in FAMILIES
    for info in pkgutil.iter_modules([f"{jaxllm.ops.__path__[0]}/{family}"])
]
OPS = {
    op.name: op for module in MODULES for op in vars(module).values() if isinstance(op, Op)
}.values()


def implementations():
    """Each function that dispatch may run, without the references, which serve every call."""
    for op in OPS:
        for backend in ("cuda", "pallas", "xla"):
            module = getattr(op, backend)
            for direction in Direction:
                stem = op.stem(direction)
                if hasattr(module, stem):
                    yield pytest.param(op, module, stem, id=f"{backend}-{stem}")


IMPLEMENTATIONS = list(implementations())
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def names(fn, kinds):
    return [p.name for p in inspect.signature(fn).parameters.values() if p.kind in kinds]


def takes(fn, kind):
    return any(p.kind is kind for p in inspect.signature(fn).parameters.values())


def test_all_ops_are_found():
    stems = {param.values[2] for param in IMPLEMENTATIONS}
    assert {"layer_norm_backward", "wgrad_pair", "decode_attention"} < stems
    for op in OPS:  # and each op has an implementation that dispatch reaches
        modules = [module for module in (op.cuda, op.pallas, op.xla) if module is not None]
        assert not modules or any(param.values[0] is op for param in IMPLEMENTATIONS), op.name


@pytest.mark.parametrize(("op", "module", "stem"), IMPLEMENTATIONS)
def test_a_direction_has_a_predicate_for_its_own_arrays(op, module, stem):
    check = predicate(module, op, stem, "unsupported")
    assert check is not None, f"add {stem}_unsupported beside {stem}"
    assert names(check, POSITIONAL), f"{check} reads no array by its name"
    assert_made_for(check, op, module, stem)


@pytest.mark.parametrize(("op", "module", "stem"), IMPLEMENTATIONS)
def test_what_says_that_a_direction_is_slower_is_made_for_its_arrays(op, module, stem):
    check = predicate(module, op, stem, "slower")
    is_for_some = any(name.endswith("_slower") for name in vars(module) if name.startswith(op.name))
    if check is not None:
        assert_made_for(check, op, module, stem)
    else:
        assert not is_for_some, f"add {stem}_slower beside {stem}, which may return None"


def assert_made_for(check, op, module, stem):
    """By names: what a predicate calls its arrays is what the implementation calls them."""
    arrays = names(check, POSITIONAL)
    implementation = getattr(module, stem)
    reference = getattr(op.reference, stem, implementation)
    known = [names(fn, POSITIONAL) for fn in (implementation, reference)]
    assert arrays in [some[: len(arrays)] for some in known], (
        f"{stem} has the arrays {known[0]}, and its predicate takes {arrays}"
    )
    # It must take all of them, and all options.
    every = known[takes(implementation, inspect.Parameter.VAR_POSITIONAL)]
    assert takes(check, inspect.Parameter.VAR_POSITIONAL) or len(arrays) >= len(every)
    options = set(names(implementation, [inspect.Parameter.KEYWORD_ONLY])) - {"interpret"}
    read = set(names(check, [inspect.Parameter.KEYWORD_ONLY]))
    assert takes(check, inspect.Parameter.VAR_KEYWORD) or read >= options
    is_open = takes(implementation, inspect.Parameter.VAR_KEYWORD)
    assert read <= options or is_open, f"{stem} has no options {read - options}"


@pytest.mark.parametrize("backend", ["pallas", "auto"])
def test_gpt2_has_gradients_of_32_sequences_of_8192_tokens(backend):
    # The gradients of two weights have both hidden layers for operands, and no weight: their
    # predicate was once told of a product of 2^31 elements that nobody makes.
    config = gpt2.GPT2Config(max_seq_len=8192, layers=2)
    tokens = jax.ShapeDtypeStruct((32, 8192), jnp.int32)

    def gradients(params, tokens):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return jax.grad(gpt2.loss)(params, tokens, tokens, config)

    params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), config))
    with jaxllm.use_backend(backend):
        program = testing.lower_for_cuda(gradients, params, tokens)
    assert ("@jaxllm_" if backend == "auto" and ffi.is_available() else "triton") in program
