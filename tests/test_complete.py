"""Decoding with a cache, against the same model without one, and against Hugging Face's."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import testing
from jaxllm.convert.huggingface import to_state_dict
from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.inference.generate import complete, stream
from jaxllm.inference.paged_cache import init_paged_cache
from jaxllm.inference.sampling import sample
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, unstack
from jaxllm.models.special_tokens import SpecialTokens

GPT2 = gpt2.GPT2Config(vocab_size=61, max_seq_len=160, layers=2, heads=2, width=32)
LLAMA3 = llama3.Llama3Config(
    vocab_size=61, max_seq_len=160, layers=2, heads=4, kv_heads=2, width=64, mlp_width=48,
    rope_theta=100.0, rope_scaling=None,
)  # fmt: skip
MODELS = [pytest.param(gpt2, GPT2, id="gpt2"), pytest.param(llama3, LLAMA3, id="llama3")]
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


@functools.cache
def random_params(model: Any, config):
    """Parameters with deviations so large that the likeliest token changes from place to place."""
    params = model.init(jax.random.key(0), config)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return tree.unflatten([x + n for x, n in zip(leaves, noise, strict=True)])


def recomputed(model, config, params, prompt, count):
    """Greedy search that reads the whole text anew for each token."""
    forward = jax.jit(model.forward, static_argnums=2)
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.array([tokens + [0] * (config.max_seq_len - len(tokens))])
        logits = forward(params, padded, config)[0, len(tokens) - 1, : config.vocab_size]
        tokens.append(int(jnp.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_greedy_is_that_of_full_recomputation(model, config):
    params = random_params(model, config)
    out = complete(model, params, PROMPTS, config=config, max_new_tokens=128, temperature=0)
    for prompt, new in zip(PROMPTS, out, strict=True):
        assert new.tolist() == recomputed(model, config, params, prompt, 128)
    assert len(set(out[0].tolist())) > 3  # not the same token over and over


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_greedy_is_that_of_hugging_face(model, config, huggingface):
    torch, transformers = huggingface
    params = random_params(model, config)
    if model is gpt2:
        theirs = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=61, n_positions=160, n_embd=32, n_layer=2, n_head=2,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    else:
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160,
                rms_norm_eps=1e-5, rope_theta=100.0, tie_word_embeddings=False,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
    state = {name: torch.from_numpy(x.copy()) for name, x in to_state_dict(params, config).items()}
    theirs.load_state_dict(state, strict=False)
    theirs = theirs.float().eval()
    prompt = PROMPTS[2]
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=128, do_sample=False, pad_token_id=0
    )[0, len(prompt) :]
    (out,) = complete(model, params, [prompt], config=config, max_new_tokens=128, temperature=0)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.covering(("model",), ("temperature",))
def test_a_stream_has_the_same_tokens(model, config, temperature):
    options = {"config": config, "max_new_tokens": 12, "temperature": temperature, "top_p": 0.9}
    params, key = random_params(model, config), jax.random.key(3)
    (out,) = complete(model, params, PROMPTS[:1], **options, key=key)
    assert list(stream(model, params, PROMPTS[0], **options, key=key)) == out.tolist()


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_a_stop_token_ends_a_text_and_no_other(model, config):
    params = random_params(model, config)
    options = {"config": config, "max_new_tokens": 20, "temperature": 0}
    free = complete(model, params, PROMPTS, **options)
    stop = int(free[0][4])
    stopped = complete(model, params, PROMPTS, **options, stop_tokens=[stop])
    for before, after in zip(free, stopped, strict=True):
        where = np.flatnonzero(before == stop)
        assert after.tolist() == before[: where[0] + 1 if len(where) else None].tolist()
    # One or a list of them, as a config's `eos_token_id`; an iterator would be used up.
    for stops in (stop, [stop], (60, stop)):
        streamed = stream(model, params, PROMPTS[0], **options, stop_tokens=stops)
        assert list(streamed) == stopped[0].tolist()
    (out,) = complete(model, params, PROMPTS[:1], **options, stop_tokens=stop)
    assert out.tolist() == stopped[0].tolist()
    # Those that the model's checkpoint names, unless the caller wants none.
    for ends in (stop, [60, stop], (60, stop)):
        eos: Any = ends
        named = dataclasses.replace(config, special_tokens=SpecialTokens(eos=eos))
        options |= {"config": named}
        assert list(stream(model, params, PROMPTS[0], **options)) == stopped[0].tolist()
    (out,) = complete(model, params, PROMPTS[:1], **options)
    assert out.tolist() == stopped[0].tolist()
    (out,) = complete(model, params, PROMPTS[:1], **options, stop_tokens=())
    assert out.tolist() == free[0].tolist()


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_an_int8_cache_is_close(model, config):
    params = random_params(model, config)
    tokens, lengths = jnp.array([[5, 9, 2, 4], [7, 1, 0, 0]]), jnp.array([4, 2])

    @jax.jit
    def run(params, cache):
        _, cache = prefill(model, params, tokens, lengths, config, cache)
        return decode_step(model, params, jnp.array([3, 8]), config, cache)

    found = {}
    for dtype in (jnp.float32, jnp.int8):
        logits, cache = run(params, init_cache(config, 2, 8, dtype))
        assert cache.lengths.tolist() == [5, 3]
        found[dtype] = logits[:, : config.vocab_size]
    difference = abs(found[jnp.int8] - found[jnp.float32]).max()
    assert 0 < difference < 0.05 * abs(found[jnp.float32]).max()


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize(("dtype", "page_size"), [(None, 4), (jnp.int8, 7)])
@pytest.mark.covering(("model",), ("dtype",), ("page_size",))
def test_a_cache_in_pages_gives_the_same_tokens(model, config, dtype, page_size):
    params = random_params(model, config)
    options = {"config": config, "max_new_tokens": 10, "temperature": 0, "cache_dtype": dtype}
    expected = complete(model, params, PROMPTS, **options)
    found = complete(model, params, PROMPTS, **options, page_size=page_size)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    streamed = stream(model, params, PROMPTS[1], **options, page_size=page_size)
    assert list(streamed) == expected[1].tolist()


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("is_laid_out", [False, True])
@pytest.mark.covering(("model", "is_laid_out"), ("dtype",))
def test_steps_with_pages_have_the_bits_of_those_without(model, config, dtype, is_laid_out):
    params = random_params(model, config)
    params = for_decoding(params) if is_laid_out else params
    tokens, lengths = jnp.array([[5, 9, 2, 4, 1], [7, 1, 0, 0, 0]]), jnp.array([5, 2])

    @jax.jit
    def run(params, cache):
        first, cache = prefill(model, params, tokens, lengths, config, cache)
        return first, *decode_step(model, params, jnp.array([3, 8]), config, cache)

    first, second, _ = run(params, init_cache(config, 2, 8, dtype))
    paged = init_paged_cache(config, [8, 8], 4, dtype)
    paged_first, paged_second, cache = run(params, paged)
    np.testing.assert_array_equal(paged_first, first)
    np.testing.assert_array_equal(paged_second, second)
    assert cache.lengths.tolist() == [6, 3]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_pages_of_layers_with_windows_match_a_ring(dtype):
    config = dataclasses.replace(LLAMA3, window=(3, None))
    model: Any = llama3
    params = random_params(model, config)
    tokens, lengths = jnp.array([[5, 9, 2, 4, 1], [7, 1, 0, 0, 0]]), jnp.array([5, 2])

    @jax.jit
    def run(params, cache):
        logits, cache = prefill(model, params, tokens, lengths, config, cache)
        found = [logits]
        for token in range(4):
            logits, cache = decode_step(model, params, jnp.array([token, 8]), config, cache)
            found.append(logits)
        return jnp.stack(found)

    expected = run(params, init_cache(config, 2, 12, dtype))
    found = run(params, init_paged_cache(config, [12, 12], 4, dtype))
    testing.assert_close(found, expected, "float32")


def test_a_sequence_wastes_less_than_a_page():
    cache = init_paged_cache(GPT2, [9, 0, 3, 8], 4, jnp.float32)
    assert cache.keys[0].shape[:2] == (3 + 0 + 1 + 2, 4)
    assert cache.block_table.tolist() == [[0, 1, 2], [6, 6, 6], [3, 6, 6], [4, 5, 6]]
    assert cache.room.tolist() == [12, 0, 4, 8]
    assert (cache.max_length, cache.page_size, cache.quantized) == (12, 4, False)
    assert init_paged_cache(GPT2, [], 4, jnp.int8).block_table.shape == (0, 0)


def test_tokens_beyond_the_pages_of_a_sequence_are_not_stored():
    model: Any = gpt2
    params = random_params(model, GPT2)
    step = jax.jit(functools.partial(decode_step, model, config=GPT2))
    cache = init_paged_cache(GPT2, [2, 6], 2, jnp.float32)
    for _ in range(2):
        _, cache = step(params, jnp.array([3, 8]), cache=cache)
    full = cache
    for _ in range(2):
        _, cache = step(params, jnp.array([4, 8]), cache=cache)
    assert cache.lengths.tolist() == [4, 4]
    for before, after in zip(full.keys, cache.keys, strict=True):
        np.testing.assert_array_equal(before[0], after[0])
        assert (before[2] != after[2]).any()
        np.testing.assert_array_equal(after[3], jnp.zeros_like(after[3]))


@pytest.mark.parametrize(
    ("config", "lengths", "page", "kind", "message"),
    [
        (GPT2, [4], 0, ValueError, "page_size is 0; it must be at least 1"),
        (GPT2, [4], 2.5, TypeError, "page_size is 2.5; it must be an integer"),
        (GPT2, [4, -1], 2, ValueError, "max_lengths has -1; the least is 0"),
        (GPT2, 4, 2, TypeError, "max_lengths is 4; it must have an integer a sequence"),
    ],
)
def test_wrong_pages_are_errors(config, lengths, page, kind, message):
    with pytest.raises(kind, match=message):
        init_paged_cache(config, lengths, page, jnp.float32)


@pytest.mark.parametrize(
    ("batch", "max_length", "dtype", "kind", "message"),
    [
        (1, 8.0, "float32", TypeError, "max_length is 8.0; it must be an integer"),
        (1, -1, "float32", ValueError, "max_length is -1; it must be at least 0"),
        (-1, 8, "float32", ValueError, "batch is -1; it must be at least 0"),
        (1, 8, "int32", TypeError, "dtype is int32; it must be int8, or floating-point"),
        (1, 8, "float8_e4m3fn", TypeError, "dtype is float8_e4m3fn; it must be int8, or float"),
        (1, 8, "half a byte", TypeError, "dtype is 'half a byte'; it must be int8, or float"),
    ],
)
def test_wrong_caches_are_errors(batch, max_length, dtype, kind, message):
    with pytest.raises(kind, match=message):
        init_cache(GPT2, batch, max_length, dtype)
    if message.startswith("dtype"):
        with pytest.raises(kind, match=message):
            init_paged_cache(GPT2, [max_length], 4, dtype)


def test_pages_come_without_a_max_length():
    model: Any = gpt2
    params = random_params(model, GPT2)
    with pytest.raises(
        ValueError, match="max_length is 40, with a page_size of 4; it must be None"
    ):
        complete(
            model, params, PROMPTS, config=GPT2, max_new_tokens=2, temperature=0,
            max_length=40, page_size=4,
        )  # fmt: skip


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_no_sequences_are_no_error(model, config):
    params = model.init(jax.random.key(0), config)
    cache = init_cache(config, 0, 8, jnp.float32)
    step = jax.jit(functools.partial(decode_step, model, config=config))
    logits, cache = step(params, jnp.zeros(0, jnp.int32), cache=cache)
    assert logits.shape == (0, config.padded_vocab_size)
    assert cache.lengths.shape == (0,)


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("is_laid_out", [False, True])
def test_a_step_without_any_pages_is_that_without_any_slots(model, config, is_laid_out):
    params = random_params(model, config)
    params = for_decoding(params) if is_laid_out else params
    step = jax.jit(functools.partial(decode_step, model, config=config))
    out, _ = step(params, jnp.array([3, 8]), cache=init_paged_cache(config, [0, 0], 2, jnp.float32))
    expected, _ = step(params, jnp.array([3, 8]), cache=init_cache(config, 2, 0, jnp.float32))
    np.testing.assert_array_equal(out, expected)


def test_float64_parameters_take_an_int8_cache():
    """JAX would warn of float64 scales in a float32 array."""
    options = {"config": GPT2, "max_new_tokens": 3, "temperature": 0, "cache_dtype": "int8"}
    model: Any = gpt2
    params = random_params(model, GPT2)
    (expected,) = complete(model, params, [[1, 2]], **options)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype("float64"), params)
        (found,) = complete(model, wide, [[1, 2]], **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_parameters_turned_before_are_taken(model, config):
    params = random_params(model, config)
    options = {"config": config, "max_new_tokens": 5, "temperature": 0}
    out = complete(model, for_decoding(params), PROMPTS, **options)
    expected = complete(model, params, PROMPTS, **options)
    assert [x.tolist() for x in out] == [x.tolist() for x in expected]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 0.0])
@pytest.mark.parametrize("options", [{"top_k": None}, {"top_k": 3}, {"top_k": None, "top_p": 0.9}])
def test_a_tiny_temperature_gives_the_likeliest_token(temperature, options):
    rows = jnp.array([[1.0, 3.0, 2.0, -jnp.inf], [-9.0, -7.0, -5.0, -6.0], [3e38, 0, -3e38, 0]])
    rows = jnp.concatenate([rows, rows + 1])
    out = sample(rows, jnp.float32(temperature), jax.random.key(0), **options)
    assert out.tolist() == jnp.argmax(rows, axis=-1).tolist()


@pytest.mark.parametrize("options", [{"top_k": None}, {"top_k": 3}, {"top_k": None, "top_p": 0.9}])
def test_an_infinite_temperature_keeps_masked_tokens_out(options):
    rows = jnp.broadcast_to(jnp.array([-jnp.inf, 3.0, -jnp.inf, -9.0]), (64, 4))
    out = sample(rows, jnp.float32(jnp.inf), jax.random.key(0), **options)
    assert set(out.tolist()) == {1, 3}


def test_top_p_keeps_the_fewest_likeliest():
    probabilities = jnp.array([0.1, 0.4, 0.2, 0.3])
    rows = jnp.broadcast_to(jnp.log(probabilities), (4000, 4))
    options = {"temperature": jnp.float32(1.0), "key": jax.random.key(0), "top_k": None}
    drawn = np.bincount(sample(rows, **options, top_p=0.65), minlength=4) / 4000
    np.testing.assert_allclose(drawn, [0, 4 / 7, 0, 3 / 7], atol=0.03)
    assert set(sample(rows, **options, top_p=1e-6).tolist()) == {1}
    drawn = np.bincount(sample(rows, **options, top_p=1.0), minlength=4) / 4000
    np.testing.assert_allclose(drawn, probabilities, atol=0.03)


TEXT: Any = ("</s>",)  # an id is an integer


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [[1], []]}, r"prompt 1 has shape \(0,\)"),
        ({"prompts": [[1, 61]]}, "prompt 0 has tokens from 1 to 61; .* from 0 to 60"),
        ({"prompts": [[-1]]}, "prompt 0 has tokens from -1"),
        ({"prompts": [[1] * 158]}, "158 tokens, 161 with .* max_seq_len is 160"),
        ({"prompts": [[1] * 9], "max_length": 10}, "9 tokens, 12 with .* max_length is 10"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0}, "key is missing"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"stop_tokens": "</s>"}, "stop_tokens is '</s>'; it must be an integer or a list of them"),
        ({"stop_tokens": [1, 2**31]}, "stop_tokens has 2147483648; it must be within int32"),
        ({"stop_tokens": 2**40}, "stop_tokens has 1099511627776; it must be within int32"),
        ({"stop_tokens": 2**70}, "stop_tokens has 1180591620717411303424; it must be within int32"),
        (
            {"key": jax.random.split(jax.random.key(0))},
            r"key has shape \(2,\); it must be a single",
        ),
        ({"key": np.zeros(3, np.uint32)}, r"key has shape \(3,\); it must be a single key"),
        ({"prompts": [[1, [2]]]}, "prompt 0 has rows of unequal lengths"),
        (
            {"stop_tokens": [1, [2]]},
            r"stop_tokens is \[1, \[2\]\]; it must be an integer or a list",
        ),
        (
            {"config": dataclasses.replace(GPT2, special_tokens=SpecialTokens(eos=TEXT))},
            r"config.special_tokens.eos is \('</s>',\); it must be an integer or a list",
        ),
        ({"config": dataclasses.replace(GPT2, layers=1)}, "params has 2 layers; it must have 1"),
        ({"config": dataclasses.replace(GPT2, vocab_size=129)}, "params has a wte of 128 rows; "),
        (
            {"config": dataclasses.replace(GPT2, heads=4)},
            r"params has a qkv weight of shape \(..., 3, 2, 16\); it must be \(..., 3, 4, 8\)",
        ),
        ({"stop_tokens": [[1]]}, r"stop_tokens is \[\[1\]\]; it must be an integer or a list"),
    ],
)
def test_refuses(wrong, message):
    options = {"prompts": [[1]], "config": GPT2, "max_new_tokens": 3, "temperature": 0.0} | wrong
    prompts = options.pop("prompts")
    model: Any = gpt2
    params = random_params(model, GPT2)
    with pytest.raises(ValueError, match=message):
        complete(model, params, prompts, **options)
    if len(prompts) == 1:
        with pytest.raises(ValueError, match=message):
            stream(model, params, prompts[0], **options)


@pytest.mark.parametrize("form", [lambda params: params, unstack, for_decoding])
@pytest.mark.parametrize(
    ("model", "of_params", "config", "error", "message"),
    [
        (gpt2, llama3, GPT2, ValueError, "params has no 'wpe'; params must be a dict from the in"),
        (
            llama3,
            gpt2,
            LLAMA3,
            ValueError,
            "params has no 'norm_f'; params must be a dict from the",
        ),
        (gpt2, gpt2, LLAMA3, TypeError, "config has type Llama3Config; it must be GPT2Config"),
        (llama3, llama3, GPT2, TypeError, "config has type GPT2Config; it must be Llama3Config"),
    ],
)
def test_refuses_another_model(model, of_params, config, error, message, form, monkeypatch):
    params = form(random_params(of_params, {gpt2: GPT2, llama3: LLAMA3}[of_params]))
    monkeypatch.setattr("jaxllm.inference.generate._laid_out", None)  # it is refused before that
    options: Any = {"config": config, "max_new_tokens": 3, "temperature": 0.0}
    with pytest.raises(error, match=message):
        complete(model, params, [[1]], **options)
    with pytest.raises(error, match=message):
        stream(model, params, [1], **options)
    with pytest.raises(error, match=message):
        model.forward(params, jnp.zeros((1, 3), jnp.int32), config)


@functools.cache
def empty_cache(config, *, in_pages, **changes) -> Any:
    config = dataclasses.replace(config, **changes)
    if in_pages:
        return init_paged_cache(config, [8, 8], 4, jnp.float32)
    return init_cache(config, 2, 8, jnp.float32)


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("is_laid_out", [False, True])
def test_a_step_refuses_tokens_and_caches_that_do_not_fit(model, config, in_pages, is_laid_out):
    params = random_params(model, config)
    params = for_decoding(params) if is_laid_out else params
    cache = empty_cache(config, in_pages=in_pages)
    misfits: Any = (
        (ValueError, r"tokens has shape \(1,\); it must be \(2,\), one for each", jnp.ones(1, int)),
        (ValueError, r"tokens has shape \(3,\); it must be \(2,\)", jnp.ones(3, int)),
        (ValueError, r"tokens has shape \(2, 1\); it must be \(2,\)", jnp.ones((2, 1), int)),
        (TypeError, "tokens has dtype float32; it must be an integer array", jnp.ones(2)),
        (TypeError, "tokens has type list; it must be an integer array", [1, 2]),
    )
    for kind, message, tokens in misfits:
        with pytest.raises(kind, match=message):
            decode_step(model, params, tokens, config, cache)


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "cache.keys has 3 layers; it must have 2, those of config"),
        ({"layers": 1}, "cache.keys has 1 layers; it must have 2, those of config"),
        ({"heads": 8, "kv_heads": 8}, "cache.keys of layer 0 has shape .*, 8, .*; it must be .*"),
        ({"width": 128}, "cache.keys of layer 0 has shape .*; it must be .*, by the key heads"),
    ],
)
def test_caches_of_another_config_are_errors(model, config, changes, message, in_pages):
    names = {field.name for field in dataclasses.fields(config)}
    changes = {name: size for name, size in changes.items() if name in names}
    params, cache = random_params(model, config), empty_cache(config, in_pages=in_pages, **changes)
    with pytest.raises(ValueError, match=message):
        decode_step(model, params, jnp.ones(2, int), config, cache)
    with pytest.raises(ValueError, match=message):
        prefill(model, params, jnp.ones((2, 3), int), jnp.ones(2, int), config, cache)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; it must be an integer"),
        ({"max_length": 10.0}, "max_length is 10.0; it must be an integer"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be an integer"),
        ({"temperature": "a"}, "temperature is 'a'; it must be a number"),
        ({"top_p": "x"}, "top_p is 'x'; it must be a number"),
        ({"key": 0}, "key has type int; it must be one of jax.random.key"),
        ({"cache_dtype": jnp.float16}, "cache_dtype is float16; it must be int8, or float32 as"),
        ({"cache_dtype": "half a byte"}, "cache_dtype is 'half a byte'; it must be int8, or"),
    ],
)
def test_options_of_other_types_are_errors(wrong, message):
    model: Any = gpt2
    params = random_params(model, GPT2)
    options = {"config": GPT2, "max_new_tokens": 3, "temperature": 0.0} | wrong
    calls: Any = (complete, [[1]]), (stream, [1])
    for run, prompts in calls:
        with pytest.raises(TypeError, match=message):
            run(model, params, prompts, **options)


@pytest.mark.parametrize("name", ["params", "prompt", "key"])
def test_traced_arguments_are_errors(name):
    model: Any = gpt2
    params = random_params(model, GPT2)
    given = {"params": params, "prompt": jnp.array([1, 2]), "key": jax.random.key(0)}

    def call(run: Any, in_list, value):
        args = given | {name: value}
        prompt = [args["prompt"]] if in_list else args["prompt"]
        options = {"config": GPT2, "max_new_tokens": 3, "key": args["key"]}
        return run(model, args["params"], prompt, **options)

    for run, in_list in ((complete, True), (stream, False)):
        with pytest.raises(TypeError, match=f"^{name}s? is traced by jax.jit, jax.vmap or the"):
            jax.eval_shape(functools.partial(call, run, in_list), given[name])


def test_prompts_that_are_no_sequence_are_an_error():
    model, prompts = gpt2, 3
    given: Any = model, random_params(model, GPT2), prompts
    with pytest.raises(TypeError, match="prompts has type int; it must be a sequence of prompts"):
        complete(*given, config=GPT2, max_new_tokens=3, temperature=0)


def test_a_cache_of_another_dtype_than_the_model_is_an_error():
    model: Any = gpt2
    params, tokens = random_params(model, GPT2), jnp.ones((1, 2), int)
    caches: list[Any] = [
        init_cache(GPT2, 1, 8, jnp.float16),
        init_paged_cache(GPT2, [8], 4, jnp.float16),
    ]
    for cache in caches:
        message = "the cache of layer 0 has dtype float16; it must have the dtype of the model's"
        with pytest.raises(TypeError, match=message):
            prefill(gpt2, params, tokens, jnp.array([2]), GPT2, cache)
        with pytest.raises(TypeError, match=message):
            decode_step(gpt2, params, tokens[:, 0], GPT2, cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 1}, "params has 2 layers; it must have 1, as config has"),
        ({"layers": 3}, "params has 2 layers; it must have 3, as config has"),
        ({"qk_norm": True}, "params has no 'q_norm' in attention; config.qk_norm is True"),
    ],
)
@pytest.mark.parametrize("is_laid_out", [False, True])
def test_parameters_of_another_config_are_errors(changes, message, is_laid_out):
    config = dataclasses.replace(LLAMA3, **changes)
    model: Any = llama3
    params, cache = random_params(model, LLAMA3), init_cache(config, 1, 8, jnp.float32)
    params = for_decoding(params) if is_laid_out else params
    with pytest.raises(ValueError, match=message):
        decode_step(llama3, params, jnp.ones(1, int), config, cache)
    with pytest.raises(ValueError, match=message):
        prefill(llama3, params, jnp.ones((1, 2), int), jnp.array([2]), config, cache)


def test_numbers_of_jax_are_options():
    model: Any = gpt2
    params = random_params(model, GPT2)
    options = {"config": GPT2, "max_new_tokens": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.5}
    given: Any = {name: x if name == "config" else jnp.asarray(x) for name, x in options.items()}
    expected = complete(model, params, [[1]], **options, key=jax.random.key(0))[0].tolist()
    found = complete(model, params, [[1]], **given, key=jax.random.key(0))[0]
    assert found.tolist() == expected
    assert list(stream(model, params, [1], **given, key=jax.random.key(0))) == expected


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_prefill_refuses_prompts_that_the_cache_is_not_for(model, config):
    params, cache = random_params(model, config), init_cache(config, 2, 8, jnp.float32)

    def refuse(message, tokens, lengths):
        with pytest.raises(ValueError, match=message):
            prefill(model, params, tokens, jnp.array(lengths), config, cache)

    ones = functools.partial(jnp.ones, dtype=int)
    refuse(
        r"tokens has shape \(2, 9\), prompts of 9; the cache has max_length 8", ones((2, 9)), [9, 1]
    )
    refuse(r"tokens has shape \(2, 0\); a prompt has at least one token", ones((2, 0)), [0, 0])
    refuse("sequences of 161; the model has max_seq_len 160", ones((2, 161)), [9, 1])
    refuse(r"cache.lengths has shape \(2,\); it must be \(1,\)", ones((1, 4)), [4])
    refuse(r"lengths has shape \(3,\); it must be \(2,\)", ones((2, 4)), [4, 4, 4])
    for wrong in (-1, 0, 5):
        refuse(
            f"lengths has {wrong}; a length is from 1 to 4, by .* tokens", ones((2, 4)), [wrong, 4]
        )
    misfits: Any = ([4, 4], "type list"), (jnp.ones(2), "dtype float32")
    for lengths, found in misfits:
        with pytest.raises(TypeError, match=f"lengths has {found}; it must be an integer array"):
            prefill(model, params, ones((2, 4)), lengths, config, cache)
