"""The examples that train models of Flax and Equinox with the functions of ``jaxllm.nn``."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm

pytest.importorskip("flax")
pytest.importorskip("equinox")

import equinox_gpt
import flax_nnx
import small_models
from flax import nnx

EXAMPLES = pytest.mark.parametrize("example", [flax_nnx, equinox_gpt], ids=["flax", "equinox"])


class Run(NamedTuple):
    """A smoke run.

    Attributes:
        losses: The loss of each step.
        gradients: The gradient of each parameter in the first step, by its path.
        donated: Whether the first step donated the whole initial state.
    """

    losses: list[float]
    gradients: dict[str, np.ndarray]
    donated: bool


def run(example, *arguments) -> Run:
    """Runs a script, and records what its training step takes and returns."""
    train, runs = small_models.train, []

    def recorded_train(step, initial, options):
        moments: dict[str, Any] = {}

        def recorded_step(state, tokens, labels):
            state, loss = step(state, tokens, labels)
            for path, x in jax.tree_util.tree_leaves_with_path(state):
                parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
                if "mu" in parts:  # AdamW's first moment is 0.1 of the gradient after one step
                    name = "/".join(parts[parts.index("mu") + 1 :])
                    moments.setdefault(name, np.array(x) / 0.1)
            return state, loss

        state, losses, seconds = train(recorded_step, initial, options)
        donated = all(x.is_deleted() for x in jax.tree.leaves(initial))
        runs.append(Run(losses, moments, donated))
        return state, losses, seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_models, "train", recorded_train)
        example.main(["--smoke", *arguments])
    return runs[0]


# One test, because all of it needs the same two compiled steps.
@EXAMPLES
def test_both_variants_have_equal_gradients_and_learn(example, capsys):
    # auto would leave attention to jax.nn on a machine without kernels.
    with jaxllm.use_backend("xla"):
        ours, plain = run(example, "--explain"), run(example, "--plain")
    np.testing.assert_allclose(ours.losses[0], plain.losses[0], rtol=1e-6)
    assert ours.gradients.keys() == plain.gradients.keys() and len(ours.gradients) >= 15
    largest = max(np.abs(x).max() for x in plain.gradients.values())
    for name, x in plain.gradients.items():
        atol = 1e-6 * largest
        np.testing.assert_allclose(ours.gradients[name], x, rtol=1e-5, atol=atol, err_msg=name)
    for one in (ours, plain):
        assert min(one.losses[-2:]) < one.losses[0] - 0.5
        assert one.donated

    printed = capsys.readouterr().out
    with_ours, with_plain = printed.split("with plain functions.\n")
    assert "with jaxllm.nn.\n" in with_ours
    for op in ("flash_attention_backward", "layer_norm_backward", "linear_cross_entropy"):
        assert f"\n{op}" in with_ours
    for text, one in ((with_ours, ours), (f"\n{with_plain}", plain)):
        assert f"\nstep     8  loss {one.losses[-1]:.4f}\n" in text
        assert len(re.findall(r"\nstep ", text)) == len(one.losses) == 8
        assert re.search(r"\n[\d.]+ ms/step, [\d,]+ tokens/s\n", text)


@EXAMPLES
def test_a_gpu_runs_the_kernels_in_bfloat16(example, with_kernels):
    arguments = ["--smoke", "--width", "64", "--heads", "1", "--dtype", "bfloat16"]
    options = small_models.parse(arguments, "")
    steps = []

    def initial():
        state, step = example.make_step(options)
        steps.append(step)
        return state

    state = jax.eval_shape(initial)
    tokens = jax.ShapeDtypeStruct((options.batch_size, options.seq_len), jnp.int32)
    calls = jaxllm.explain(steps[0], state, tokens, tokens).calls
    assert {call.on_gpu for call in calls} <= {"cuda", "its parts"}
    by_stem = {call.stem: call.shapes for call in calls}
    attention, norm = by_stem["flash_attention_forward"], by_stem["layer_norm_forward"]
    assert attention.startswith("bf16[4,32,1,64]") and norm.startswith("bf16[4,32,64]")
    assert by_stem["linear_cross_entropy_with_gradients"].startswith("bf16[128,64] bf16[")


def test_arguments_of_flax_attention_are_served_or_refused():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, n, 4)), jnp.float32) for n in (4, 2, 2))
    expected = nnx.dot_product_attention(q, k, v, is_causal=True)
    served: Any = {"dropout_rate": 0.1, "deterministic": True, "precision": None, "dtype": None}
    with jaxllm.use_backend("xla"):
        found = flax_nnx.attention(q, k, v, is_causal=True, **served)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Flax's masks are numbers; auto leaves them to jax.nn.
    mask = nnx.make_causal_mask(jnp.ones((2, 5)))
    np.testing.assert_allclose(flax_nnx.attention(q, k, v, mask=mask), expected, atol=1e-6)
    refusals: list[Any] = [{"dropout_rate": 0.1}, {"module": nnx.Module()}]
    for refused in refusals:
        with pytest.raises(ValueError, match="has no dropout, and returns no attention weights"):
            flax_nnx.attention(q, k, v, **refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30", "--heads", "4"], "--width is 30; it must be a multiple of --heads"),
        (["--seq-len", "0"], "--seq-len is 0; at least 1"),
        (["--vocab-size", "256"], "--vocab-size is 256; at least 257"),
        (["--steps", "2"], "--steps is 2; at least 3"),
        (["--seed", "-1"], "--seed is -1; from 0 to 2**63 - 1"),
        (["--learning-rate", "nan"], "--learning-rate is nan; finite and at least 0"),
    ],
)
def test_misuse_is_reported_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        small_models.parse(["--smoke", *arguments], "")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "arguments", "stem"),
    [
        ({"num_kv_heads": 2, "normalize_qk": True}, {"is_causal": True}, "flash_attention_forward"),
        ({"dropout_rate": 0.5}, {"deterministic": True}, "flash_attention_forward"),
        ({"dtype": jnp.bfloat16}, {}, "flash_attention_forward"),
        ({}, {"mask": np.ones((1, 1, 8, 8), np.float32)}, "dot_product_attention"),
    ],
)
def test_table_in_docs_has_the_options_of_flax(options, arguments, stem):
    def attend(x):
        layer = nnx.MultiHeadAttention(
            4, 16, attention_fn=flax_nnx.attention, decode=False, rngs=nnx.Rngs(0), **options
        )
        return layer(x, **arguments)

    with jaxllm.use_backend("xla"):
        calls = jaxllm.explain(attend, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)).calls
    assert [call.stem for call in calls] == [stem]
    assert calls[0].shapes.startswith("bf16" if "dtype" in options else "f32")


def test_examples_in_docs_run(capsys):
    page = Path(__file__).parent.parent / "docs" / "use_from_your_model.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    with jaxllm.use_backend("xla"):
        exec(compile("\n".join(blocks), str(page), "exec"), names)
    assert [call.stem for call in names["calls"]] == ["flash_attention_forward"]
    np.testing.assert_array_equal(names["y"], 0)  # of equal elements
    example, x, labels = names["loss"], jnp.ones((2, 16, 64)), jnp.zeros((2, 16), int)
    shapes = {"norm": (64,), "qkv": (64, 3, 4, 16), "out": (4, 16, 64), "lm_head": (64, 50)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    found = {call.stem for call in jaxllm.explain(jax.grad(example), params, x, labels).calls}
    assert {"rms_norm_backward", "linear_cross_entropy_with_gradients"} <= found
    # The page shows what its last example prints.
    shown = re.findall(r"^```\n(op .*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert shown == [capsys.readouterr().out]
