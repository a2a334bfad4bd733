"""Attention masks: causal, sliding window, segment ids and queries without keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import FLASH_BACKENDS, attention_arrays, attention_by_hand, attention_gradients

from jaxllm.ops import flash_attention
from jaxllm.ops.attention import pallas_flash, reference
from jaxllm.testing import error


@pytest.mark.parametrize(
    ("lengths", "options", "visible"),
    [
        ((6, 6), {}, lambda t, s: True),
        ((6, 6), {"causal": True}, lambda t, s: s <= t),
        ((3, 7), {"causal": True}, lambda t, s: s <= t + 4),
        ((7, 3), {"causal": True}, lambda t, s: s <= t - 4),
        ((6, 6), {"causal": True, "window": 1}, lambda t, s: s == t),
        ((6, 6), {"causal": True, "window": 3}, lambda t, s: s in (t - 2, t - 1, t)),
        ((6, 6), {"causal": True, "window": 99}, lambda t, s: s <= t),
        ((6, 6), {"window": 2}, lambda t, s: s in (t - 1, t, t + 1)),
        ((3, 7), {"window": 2}, lambda t, s: s in (t + 3, t + 4, t + 5)),
        ((6, 6), {"window": (1, 2)}, lambda t, s: t - 1 <= s <= t + 2),
        ((3, 7), {"window": (0, 1)}, lambda t, s: s in (t + 4, t + 5)),
        ((6, 6), {"window": (None, 1)}, lambda t, s: s <= t + 1),
        ((6, 6), {"window": (2, None)}, lambda t, s: s >= t - 2),
        ((6, 6), {"window": (None, None)}, lambda t, s: True),
        ((6, 6), {"window": (2, 0)}, lambda t, s: s in (t - 2, t - 1, t)),
        ((6, 6), {"window": (1, 4), "causal": True}, lambda t, s: s in (t - 1, t)),
        ((6, 6), {"window": (None, 4), "causal": True}, lambda t, s: s <= t),
    ],
)
def test_mask_options_select_the_visible_keys(lengths, options, visible):
    T, S = lengths
    q, k, v = attention_arrays(T=T, S=S)
    expected = attention_by_hand(q, k, v, lambda _, t, s: visible(t, s))
    assert error(flash_attention(q, k, v, **options), expected) < 1e-6


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"window": (2, 2)}, {"window": 3}),
        ({"window": (2, 0)}, {"window": 3, "causal": True}),
        ({"window": [None, 0]}, {"causal": True}),
        ({"window": (3, 5), "causal": True}, {"window": 4, "causal": True}),
        ({"window": (None, None)}, {}),
        ({"window": 1}, {"window": 1, "causal": True}),
    ],
)
def test_windows_with_a_shorter_form_run_as_that(given, same):
    q, k, v = attention_arrays()
    programs = (
        str(jax.make_jaxpr(lambda *qkv: flash_attention(*qkv, **options))(q, k, v))  # noqa: B023
        for options in (given, same)
    )
    assert next(programs) == next(programs)


@pytest.mark.parametrize(
    ("window", "kind", "message"),
    [
        (0, ValueError, "window is 0; it must be at least 1"),
        ((1,), ValueError, r"window is \(1,\); it must be an integer or a pair, \(left, right\)"),
        ((-1, 2), ValueError, r"window is \(-1, 2\); left and right must be at least 0, or None"),
        ((2, -1), ValueError, r"window is \(2, -1\); left and right must be at least 0, or None"),
        ((1, 2.5), TypeError, "window is 2.5; it must be an integer"),
        ("ab", TypeError, "window is 'ab'; it must be an integer"),
    ],
)
def test_wrong_windows_are_errors(window, kind, message):
    q, k, v = attention_arrays()
    with pytest.raises(kind, match=message):
        flash_attention(q, k, v, window=window)


def test_segments_do_not_attend_to_each_other():
    q, k, v = attention_arrays()
    segments = jnp.array([[0, 0, 0, 1, 1, 1], [7, 3, 3, 7, 7, 3]])
    of = np.asarray(segments)
    expected = attention_by_hand(q, k, v, lambda b, t, s: s <= t and of[b, t] == of[b, s])
    assert error(flash_attention(q, k, v, causal=True, segment_ids=segments), expected) < 1e-6


def test_segment_ids_of_queries_and_keys_may_differ():
    q, k, v = attention_arrays(T=3, S=5)
    of_query, of_key = np.array([[0, 1, 2]] * 2), np.array([[0, 1, 1, 0, 0], [2, 2, 1, 1, 1]])
    out = flash_attention(q, k, v, segment_ids=(jnp.array(of_query), jnp.array(of_key)))
    expected = attention_by_hand(q, k, v, lambda b, t, s: of_query[b, t] == of_key[b, s])
    assert error(out, expected) < 1e-6


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 2, "softcap": 3.0}])
def test_segment_gradients_match_reference(options):
    q, k, v = attention_arrays(N=4, K=2)
    segments = jnp.array([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 5, 5]])

    def total(attention):
        return lambda *qkv: jnp.sin(attention(*qkv, segment_ids=segments, **options)).sum()

    found, expected = (
        jax.jit(jax.grad(total(attention), argnums=(0, 1, 2)))(q, k, v)
        for attention in (flash_attention, reference.flash_attention)
    )
    for a, e in zip(found, expected, strict=True):
        assert error(a, e) < 2e-6


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
def test_query_without_visible_keys_has_zero_output_and_gradient(backend):
    q, k, v = attention_arrays(T=5, S=3)
    options = {"causal": True, "scale": 1.0, "window": None, "softcap": None}
    if backend == "pallas":
        options["interpret"] = jax.default_backend() != "gpu"
    module = {"xla": reference, "pallas": pallas_flash}[backend]
    out, lse = module.flash_attention_forward(q, k, v, None, **options)
    assert not out[:, :2].any()
    np.testing.assert_array_equal(lse[:, :, :2], -np.inf)
    assert np.isfinite(lse[:, :, 2:]).all()
    dq, dk, dv = attention_gradients(q, k, v, causal=True, backend=backend)
    assert not dq[:, :2].any()
    assert dq[:, 3:].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("of_key", [[1, 1, 1, 1], [9, 0, 9, 0]])
def test_all_gradients_are_zero_if_no_query_has_visible_keys(of_key, backend):
    q, k, v = attention_arrays(T=4)
    segments = (jnp.full((2, 4), 3), jnp.array([of_key] * 2))
    options = {"segment_ids": segments, "backend": backend}
    assert not flash_attention(q, k, v, **options).any()
    assert not any(x.any() for x in attention_gradients(q, k, v, **options))
