import dataclasses
import json
from typing import Any

import generate as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxllm.convert import huggingface
from jaxllm.inference.generate import generate
from jaxllm.inference.sampling import sample
from jaxllm.models import gpt2

GREEDY: dict[str, Any] = {"temperature": 0}
CONFIG = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=32)
PARAMS = gpt2.init(jax.random.key(0), CONFIG)


@dataclasses.dataclass(frozen=True)
class Toy:
    """A model whose logits are a fixed row, whatever it reads."""

    vocab_size: int = 5
    max_seq_len: int = 8


# Ids 5 to 7 are padding, and the likeliest.
ROW = jnp.array([0.0, 3.0, 1.0, 3.0, 2.0, 50.0, 60.0, jnp.inf])


def fixed_forward(params, tokens, config):
    assert tokens.shape[1] <= config.max_seq_len
    return jnp.broadcast_to(params, (*tokens.shape, params.shape[-1]))


def count_forward(params, tokens, config):
    """Predicts the last token plus one."""
    return jax.nn.one_hot((tokens + 1) % config.vocab_size, config.vocab_size)


def first_forward(params, tokens, config):
    """Predicts the token that begins the context, plus one."""
    first = jnp.broadcast_to(tokens[:, :1] + 1, tokens.shape)
    return jax.nn.one_hot(first % config.vocab_size, config.vocab_size)


def test_counts():
    out = generate(count_forward, None, [3], config=Toy(), max_new_tokens=4, temperature=0)
    assert out.tolist() == [3, 4, 0, 1, 2]
    assert out.dtype == jnp.int32


def test_axes_follow_the_prompt():
    out = generate(
        count_forward, None, [[0, 1], [2, 3]], config=Toy(), max_new_tokens=2, temperature=0
    )
    assert out.tolist() == [[0, 1, 2, 3], [2, 3, 4, 0]]
    same = generate(count_forward, None, [1, 2], config=Toy(), max_new_tokens=0, temperature=0)
    assert same.tolist() == [1, 2]


def test_greedy_equals_a_plain_loop():
    prompt = [5, 9, 2]
    tokens = list(prompt)
    forward = jax.jit(gpt2.forward, static_argnums=2)
    for _ in range(20):  # past max_seq_len
        context = tokens[-16:]
        padded = jnp.array([context + [0] * (16 - len(context))])
        logits = forward(PARAMS, padded, CONFIG)[0, len(context) - 1, : CONFIG.vocab_size]
        tokens.append(int(jnp.argmax(logits)))
    options = {"config": CONFIG, "max_new_tokens": 20, "temperature": 0}
    out = generate(gpt2.forward, PARAMS, prompt, **options)
    assert out.tolist() == tokens
    again = generate(gpt2.forward, PARAMS, prompt, **options, key=jax.random.key(1))
    assert again.tolist() == tokens


@pytest.mark.parametrize("length", [3, 7, 8, 12])
def test_window_slides(length):
    prompt = np.arange(10, 10 + length) % 61
    config = Toy(vocab_size=61, max_seq_len=8)
    out = generate(first_forward, None, prompt, config=config, max_new_tokens=9, temperature=0)
    expected = prompt.tolist()
    for _ in range(9):
        expected.append((expected[-8:][0] + 1) % 61)
    assert out.tolist() == expected


def test_sampling_repeats_with_its_key():
    options = {"config": CONFIG, "max_new_tokens": 12}
    one = generate(gpt2.forward, PARAMS, [1], **options, key=jax.random.key(0))
    same = generate(gpt2.forward, PARAMS, [1], **options, key=jax.random.key(0))
    other = generate(gpt2.forward, PARAMS, [1], **options, key=jax.random.key(1))
    assert one.tolist() == same.tolist() != other.tolist()


def drawn(n=4000, **options):
    prompt = np.zeros((n, 1), int)
    out = generate(
        fixed_forward, ROW, prompt, config=Toy(), max_new_tokens=2, key=jax.random.key(0), **options
    )
    return np.bincount(np.asarray(out)[:, 1:].ravel(), minlength=8) / (2 * n)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_k": 99}, {"temperature": 0}])
def test_padding_is_never_sampled(options):
    assert drawn(**options)[5:].sum() == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature(temperature):
    expected = jax.nn.softmax(ROW[:5] / temperature)
    np.testing.assert_allclose(drawn(temperature=temperature)[:5], expected, atol=0.02)


def test_top_k_keeps_k_tokens_and_their_odds():
    frequencies = drawn(top_k=3)
    assert set(np.flatnonzero(frequencies)) == {1, 3, 4}
    expected = jax.nn.softmax(ROW[jnp.array([1, 3, 4])])
    np.testing.assert_allclose(frequencies[[1, 3, 4]], expected, atol=0.02)
    # 1 and 3 tie; k of one lets one of them in all the same.
    assert np.count_nonzero(drawn(top_k=1)) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_tokens": []}, "shape \\(0,\\)"),
        ({"prompt_tokens": 3}, "shape \\(\\)"),
        ({"prompt_tokens": [1, 5]}, "prompt_tokens has tokens from 1 to 5; .* from 0 to 4"),
        ({"prompt_tokens": [[1], [-1]]}, "prompt_tokens has tokens from -1"),
        ({"prompt_tokens": [1.0, 2.0]}, "prompt_tokens has dtype float32; it must be integers"),
        # JAX would keep the lower 32 bits of these.
        ({"prompt_tokens": np.array([2**32 + 3])}, "prompt_tokens has tokens from 4294967299"),
        ({"prompt_tokens": [1, 2**40]}, "prompt_tokens has tokens from 1 to 1099511627776"),
        ({"prompt_tokens": [1, 2**70]}, "prompt_tokens has dtype object; it must be integers"),
        ({"prompt_tokens": [[1, 2], [3]]}, "prompt_tokens has rows of unequal lengths"),
        ({"prompt_tokens": None}, "prompt_tokens has shape \\(\\); it must be"),
        ({"key": np.zeros(3, np.uint32)}, "key has shape \\(3,\\); it must be a single key"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"key": None}, "key is missing"),
    ],
)
def test_refuses(wrong, message):
    options = {"prompt_tokens": [1], "max_new_tokens": 1, "key": jax.random.key(0), **wrong}
    with pytest.raises(ValueError, match=message):
        generate(count_forward, None, config=Toy(), **options)


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (ValueError, r"logits has shape \(8,\); it must be \(B, V\)", {"logits": ROW}),
        (TypeError, "logits has dtype int32", {"logits": jnp.ones((1, 8), jnp.int32)}),
        (ValueError, "top_k is 0; it must be at least 1", {"top_k": 0}),
        (TypeError, "top_k is 2.0; it must be an integer", {"top_k": 2.0}),
        (ValueError, "top_p is 1.5; it must be above 0", {"top_p": 1.5}),
        (TypeError, "top_p is 'all'; it must be a number", {"top_p": "all"}),
        (ValueError, r"it must be \(B, V\) with V at least 1", {"logits": jnp.ones((1, 0))}),
        (TypeError, "temperature has type NoneType; it must be", {"temperature": None}),
        (ValueError, r"temperature is -1\.0; it must be at least 0", {"temperature": -1.0}),
        (
            ValueError,
            r"temperature has shape \(8,\); it must be a scalar, or \(1, 1\) for one a row",
            {"temperature": jnp.ones(8)},
        ),
        (TypeError, "key has type int; it must be one of jax.random.key", {"key": 0}),
        (ValueError, r"key has shape \(2,\)", {"key": jax.random.split(jax.random.key(0))}),
    ],
)
def test_sample_refuses(kind, message, options):
    given = {"logits": ROW[None], "temperature": jnp.ones(()), "top_k": None, **options}
    with pytest.raises(kind, match=message):
        sample(**{"key": jax.random.key(0), **given})


def test_a_traced_prompt_is_taken():
    def run(token):
        return generate(count_forward, None, [token, 1], config=Toy(), max_new_tokens=1, **GREEDY)

    assert jax.jit(run)(3).tolist() == [3, 1, 2]


def test_numbers_of_jax_are_options():
    options = {"max_new_tokens": jnp.int32(2), "top_k": jnp.int32(1), "temperature": np.float64(2)}
    out = generate(count_forward, None, [1], config=Toy(), key=jax.random.PRNGKey(0), **options)
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; it must be an integer"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be an integer"),
        ({"temperature": "a"}, "temperature is 'a'; it must be a number"),
        ({"key": 0}, "key has type int; it must be one of jax.random.key"),
        ({"key": jnp.zeros(2)}, "key has dtype float32; it must be one of jax.random.key"),
    ],
)
def test_options_of_other_types_are_errors(wrong, message):
    options = {"prompt_tokens": [1], "max_new_tokens": 1, "key": jax.random.key(0), **wrong}
    with pytest.raises(TypeError, match=message):
        generate(count_forward, None, config=Toy(), **options)


@pytest.fixture
def chat_folder(tmp_path):
    """A model whose parameters are zero: it writes token 0 until that ends the text."""
    names = ["zero", "one", "<eos>", "<turn>"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<eos>", "<turn>"])
    (tmp_path / "source").mkdir()
    inner.save(str(tmp_path / "source" / "tokenizer.json"))
    config = dataclasses.replace(CONFIG, vocab_size=4)
    params = jax.tree.map(jnp.zeros_like, gpt2.init(jax.random.key(0), config))
    folder = tmp_path / "model"
    huggingface.save(folder, params, config, tokenizer_json=tmp_path / "source" / "tokenizer.json")
    return folder


def written(folder, capsys, *options):
    """How many tokens the example writes after a prompt."""
    flags = ["--model", str(folder), "--temperature", "0", "--max-new-tokens", "5"]
    example.main([*flags, *options, "one"])
    return int(capsys.readouterr().out.splitlines()[-1].split()[0])


@pytest.mark.parametrize(
    ("file", "contents", "count"),
    [
        ("config.json", {"eos_token_id": [3, 0]}, 1),
        ("generation_config.json", {"eos_token_id": [0, 3]}, 1),
        ("generation_config.json", {"eos_token_id": 3}, 5),
        ("tokenizer_config.json", {"eos_token": "zero"}, 1),
    ],
)
def test_the_example_stops_at_any_end_that_a_config_names(
    chat_folder, capsys, file, contents, count
):
    path = chat_folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | contents))
    assert written(chat_folder, capsys) == count


def test_the_example_stops_at_the_end_that_is_named(chat_folder, capsys):
    (chat_folder / "generation_config.json").write_text('{"eos_token_id": [0]}')
    assert written(chat_folder, capsys, "--end-of-text", "zero") == 1
    assert written(chat_folder, capsys, "--end-of-text", "<turn>") == 5  # and at no other
    with pytest.raises(SystemExit, match="end_of_text is 'halt', and the vocabulary has no halt"):
        written(chat_folder, capsys, "--end-of-text", "halt")
