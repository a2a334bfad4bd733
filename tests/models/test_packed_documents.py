"""Rows that hold several documents: segment ids and positions in both models."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import SAVE_GEMMS, unstack
from jaxllm.testing import error

SIZES: dict[str, Any] = {"vocab_size": 61, "max_seq_len": 16, "layers": 2, "heads": 4, "width": 32}
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(**SIZES)),
    "llama3": (llama3, llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=48, rope_theta=100.0)),
}
T = 16
LENGTHS = ((5, 1, 7, 3), (16,), (8, 8))  # of the documents in each row


@functools.cache
def params_of(name):
    """Random in every array, so that the positions matter as much as the tokens."""
    module, config = MODELS[name]
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), config))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape).astype(np.float32), shapes)


def packed():
    """Rows of documents: tokens, labels, segment ids and positions."""
    tokens, labels = np.random.default_rng(0).integers(0, 61, (2, len(LENGTHS), T), np.int32)
    labels[1, 13:] = -1
    segment_ids = np.stack([np.repeat(np.arange(len(row)), row) for row in LENGTHS])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in LENGTHS])
    return tokens, labels, segment_ids, positions


def one_by_one():
    """The same documents, one a row, with padding whose labels are ignored."""
    tokens, labels, *_ = packed()
    documents = [(i, sum(row[:j]), n) for i, row in enumerate(LENGTHS) for j, n in enumerate(row)]
    apart = np.zeros((len(documents), T), np.int32), np.full((len(documents), T), -1, np.int32)
    for document, (i, start, n) in enumerate(documents):
        for whole, part in zip((tokens, labels), apart, strict=True):
            part[document, :n] = whole[i, start : start + n]
    return apart


def loss_and_gradients(name, params, tokens, labels, segment_ids=None, positions=None, **options):
    module, config = MODELS[name]
    options |= {"segment_ids": segment_ids, "positions": positions}
    loss = functools.partial(module.loss, config=config, **options)
    return jax.jit(jax.value_and_grad(loss))(params, tokens, labels)


@functools.cache
def expected(name):
    """The loss of the documents one by one, and its gradients with layers in a list."""
    loss, gradients = loss_and_gradients(name, params_of(name), *one_by_one())
    return loss, unstack(gradients)


def forward(name, params, tokens, segment_ids=None, positions=None, **options):
    module, config = MODELS[name]
    options |= {"segment_ids": segment_ids, "positions": positions}
    return module.forward(params, tokens, config, **options)


@pytest.mark.parametrize("form", ["scan", "unrolled"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.covering(("name",), ("form",))
def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents(name, form):
    params = unstack(params_of(name)) if form == "unrolled" else params_of(name)
    remat = SAVE_GEMMS if form == "unrolled" else False
    loss, gradients = loss_and_gradients(name, params, *packed(), remat=remat)
    found = loss, unstack(gradients) if form == "scan" else gradients
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected(name)), strict=True):
        assert error(a, b) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_packed_documents_do_not_depend_on_the_transformation(name):
    """Pallas kernels, vmap, and 64-bit ids give the logits of a plain call."""
    tokens, _, *documents = packed()
    run = functools.partial(forward, name, params_of(name))
    wanted = jax.jit(run)(tokens, *documents)
    with jaxllm.use_backend("pallas"):
        assert error(jax.jit(run)(tokens, *documents), wanted) <= 1e-5
    mapped = jax.jit(jax.vmap(run))(*(x[:, None] for x in (tokens, *documents)))
    assert error(mapped[:, 0], wanted) <= 1e-5
    with jax.enable_x64(True):
        found = jax.jit(run)(tokens, *(x.astype(np.int64) for x in documents))
    assert found.dtype == jnp.float32 and error(found, wanted) <= 1e-5


def test_float8_gemms_take_packed_documents():
    tokens, _, *documents = packed()
    run = jax.jit(functools.partial(forward, "llama3", params_of("llama3"), precision="row"))
    found, one_document = run(tokens, *documents), run(tokens)
    # The first document is the beginning of its row in either form.
    assert error(found[0, :5], one_document[0, :5]) <= 1e-5
    assert error(found[0, 5:], one_document[0, 5:]) > 1e-3


def test_segments_or_positions_may_be_given_alone():
    tokens, _, segment_ids, positions = packed()
    run = jax.jit(functools.partial(forward, "gpt2", params_of("gpt2")))
    wanted = run(tokens)
    ones, whole = jnp.ones_like(segment_ids), jnp.arange(T) + jnp.zeros_like(positions)
    assert error(run(tokens, segment_ids=ones), wanted) <= 1e-5
    assert error(run(tokens, positions=whole), wanted) <= 1e-5
    assert error(run(tokens, segment_ids=segment_ids), wanted) > 1e-3
    assert error(run(tokens, positions=positions), wanted) > 1e-3


@pytest.mark.parametrize("argument", ["segment_ids", "positions"])
@pytest.mark.parametrize("name", MODELS)
def test_ids_that_do_not_fit_are_rejected(name, argument):
    module, config = MODELS[name]
    tokens = jnp.zeros((2, 8), jnp.int32)
    for function, arrays in ((module.forward, (tokens,)), (module.loss, (tokens, tokens))):
        run = functools.partial(function, params_of(name), *arrays, config)
        with pytest.raises(TypeError, match=f"{argument} has dtype float32; it must be an integer"):
            run(**{argument: jnp.zeros((2, 8))})
        with pytest.raises(ValueError, match=rf"{argument} has shape \(8,\); it must be \(2, 8\)"):
            run(**{argument: jnp.zeros(8, jnp.int32)})
