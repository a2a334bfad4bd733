"""Llama 3: against Hugging Face's, and what holds of it without another to compare with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

import jaxllm
from jaxllm.convert.huggingface import config_to_dict, from_state_dict, to_state_dict
from jaxllm.models import llama3
from jaxllm.models.common import SAVE_ATTENTION, SAVE_GEMMS, stack, unstack
from jaxllm.ops import RopeScaling
from jaxllm.testing import error

# So short an original length that over 20 positions some frequencies are stretched, some blended
# and some kept.
SCALING = RopeScaling(factor=4.0, low=1.0, high=4.0, original_length=16)
CONFIG = llama3.Llama3Config(
    vocab_size=61,
    max_seq_len=24,
    layers=2,
    heads=4,
    kv_heads=2,
    width=64,
    mlp_width=48,
    rope_theta=100.0,
    rope_scaling=SCALING,
)
TIED = dataclasses.replace(CONFIG, tied_head=True)


def noisy(config):
    """Parameters that are random in every array, so that a scale that is left out shows."""
    params = llama3.init(jax.random.key(0), config)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = tree.unflatten(
        [
            leaf + 0.1 * jax.random.normal(key, leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ]
    )
    tables = {"wte", "lm_head"} & set(params)
    return params | {name: params[name].at[config.vocab_size :].set(0) for name in tables}


@pytest.fixture(scope="module")
def params():
    return noisy(CONFIG)


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(2), (2, 20), 0, CONFIG.vocab_size)
    labels = jax.random.randint(jax.random.key(3), (2, 20), 0, CONFIG.vocab_size)
    return tokens, labels.at[1, 13:].set(-1)


def loss(params, tokens, labels, **options):
    return llama3.loss(params, tokens, labels, CONFIG, **options)


logits_of = jax.jit(lambda params, tokens: llama3.forward(params, tokens, CONFIG))
loss_and_gradients = jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("direction", ["from_state_dict", "to_state_dict"])
@pytest.mark.parametrize(
    "changed",
    [
        {"kv_heads": 1},
        {"kv_heads": 2},
        {"kv_heads": 8},
        {"kv_heads": 2, "tied_head": True},
        {"kv_heads": 2, "rope_scaling": None},
    ],
    ids=str,
)
@pytest.mark.covering(("changed",), ("direction",))
def test_logits_loss_and_every_gradient_agree_with_huggingface(
    huggingface, changed, batch, direction
):
    torch, transformers = huggingface
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, heads=8, norm_eps=1e-3, **changed)
    theirs = transformers.LlamaConfig(**config_to_dict(config), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(theirs).float()
    if direction == "to_state_dict":
        params = noisy(config)
        ours = to_state_dict(params, config)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in ours.items()})
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        state_dict = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        params = from_state_dict(state_dict, config)

    tokens, labels = batch
    logits = model(torch.from_numpy(np.array(tokens)).long()).logits
    expected_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(np.array(labels)).long().flatten(), ignore_index=-1
    )
    expected_loss.backward()

    ours = jax.jit(lambda p: llama3.forward(p, tokens, config))(params)
    assert error(ours[..., : config.vocab_size], logits.detach().numpy()) <= 1e-4
    gradient = jax.jit(jax.value_and_grad(lambda p: llama3.loss(p, tokens, labels, config)))
    value, gradients = gradient(params)
    assert error(value, expected_loss.item()) <= 1e-4
    gradients = to_state_dict(gradients, config)
    compared = 0
    for name, parameter in model.named_parameters():
        found = error(gradients[name], parameter.grad.numpy())
        assert found <= 1e-4, f"{name}: {found:.3g}"
        compared += 1
    assert compared == 2 + 9 * config.layers + (not config.tied_head)


def test_scaled_positions_make_a_difference(params, batch):
    """The comparison above would otherwise say nothing of the scaling."""
    plain = dataclasses.replace(CONFIG, rope_scaling=None)
    difference = error(logits_of(params, batch[0]), llama3.forward(params, batch[0], plain))
    assert difference > 1e-2


# As Hugging Face and Meta publish them. A tied head counts once.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("3-8b", 8_030_261_248),
        ("3-70b", 70_553_706_496),
        ("3.1-8b", 8_030_261_248),
        ("3.1-70b", 70_553_706_496),
        ("3.1-405b", 405_853_388_800),
        ("3.2-1b", 1_235_814_400),
        ("3.2-3b", 3_212_749_824),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mistral-7b-v0.3", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_presets_have_the_known_number_of_parameters(name, count):
    assert llama3.num_params(llama3.PRESETS[name]) == count


def test_presets_have_the_rotary_positions_of_their_version():
    for name, config in llama3.PRESETS.items():
        if name.startswith(("mistral", "qwen")):
            assert config.rope_theta == (10_000 if name.endswith("v0.1") else 1_000_000)
            assert config.rope_scaling is None
            continue
        assert config.rope_theta == 500_000
        if name.startswith("3."):
            factor = 32.0 if name.startswith("3.2") else 8.0
            assert config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
            assert config.max_seq_len == 131072
        else:
            assert config.rope_scaling is None
            assert config.max_seq_len == 8192
        assert config.tied_head == name.startswith(("d", "3.2"))
        assert config.head_width == (64 if name.startswith(("d", "3.2-1b")) else 128)


def test_flops_count_the_matrix_products():
    config = llama3.PRESETS["3.2-1b"]
    block = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192
    weights = 16 * block + 128256 * 2048
    assert llama3.flops_per_token(config, 4096) == 6 * weights + 12 * 16 * 4096 * 2048


def test_init_draws_what_it_says():
    config = dataclasses.replace(CONFIG, vocab_size=1000, layers=8, width=128, mlp_width=256)
    params = llama3.init(jax.random.key(0), config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    ordinary = (params["wte"][:1000], params["lm_head"][:1000])
    for weight in (*ordinary, attention["qkv"]["weight"], mlp["gate_up"]["weight"]):
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    for weight in (attention["out"]["weight"], mlp["down"]["weight"]):
        assert float(weight.std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert not np.array_equal(params["wte"], params["lm_head"])
    assert not params["wte"][1000:].any()
    assert not params["lm_head"][1000:].any()
    assert (params["norm_f"]["scale"] == 1).all()
    assert "lm_head" not in llama3.init(jax.random.key(0), TIED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_dtype_of_the_parameters(params, batch, dtype):
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    logits = jax.eval_shape(lambda p: llama3.forward(p, batch[0], CONFIG), cast)
    assert (logits.shape, logits.dtype) == ((2, 20, 128), jnp.dtype(dtype))
    value = jax.eval_shape(lambda p: loss(p, *batch), cast)
    assert (value.shape, value.dtype) == ((), jnp.float32)


def test_a_fresh_model_guesses_evenly(batch):
    fresh = llama3.init(jax.random.key(0), CONFIG)
    assert float(loss_and_gradients(fresh, *batch)[0]) == pytest.approx(
        np.log(CONFIG.vocab_size), rel=0.02
    )


def test_a_token_has_no_influence_on_earlier_logits(params, batch):
    tokens, _ = batch
    changed = tokens.at[:, 11].set((tokens[:, 11] + 1) % CONFIG.vocab_size)
    before, after = (logits_of(params, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert (before[:, 11:, : CONFIG.vocab_size] != after[:, 11:, : CONFIG.vocab_size]).any()


REMATS = {"nothing": False, "activations": SAVE_GEMMS, "blocks": True}
REMATS |= {"blocks_but_attention": SAVE_ATTENTION}


@pytest.mark.parametrize("form", [stack, unstack])
@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.covering(("remat",), ("form",))
def test_remat_and_layers_apart_give_equal_gradients(remat, form, params, batch):
    _, plain = loss_and_gradients(params, *batch)
    again = stack(jax.jit(jax.grad(lambda p: loss(p, *batch, remat=REMATS[remat])))(form(params)))
    assert jax.tree.structure(plain) == jax.tree.structure(again)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert error(b, a) <= 1e-6


@pytest.mark.parametrize("form", [stack, unstack])
def test_remat_computes_again_what_its_policy_does_not_keep(form, params, batch):
    def count(primitive, **options):
        gradient = jax.grad(lambda p: loss(p, *batch, **options))
        program = jax.make_jaxpr(gradient)(form(params))
        return [e.primitive.name for e in equations(program)].count(primitive)

    assert count("logistic", remat=SAVE_GEMMS) > count("logistic")
    assert count("rsqrt", remat=SAVE_GEMMS) > count("rsqrt")
    assert count("dot_general", remat=SAVE_GEMMS) == count("dot_general")
    assert count("dot_general", remat=True) > count("dot_general")


def test_padding_has_no_influence(params, batch):
    value, gradients = loss_and_gradients(params, *batch)
    for name in ("wte", "lm_head"):
        assert not gradients[name][CONFIG.vocab_size :].any()
    loud = {name: params[name].at[CONFIG.vocab_size :].set(50.0) for name in ("wte", "lm_head")}
    loud_value, loud_gradients = loss_and_gradients(params | loud, *batch)
    assert float(loud_value) == float(value)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(loud_gradients), strict=True):
        assert error(b, a) <= 1e-6


def test_a_step_is_made_of_the_fused_ops(params, batch):
    """Attention rotates queries and keys, and each residual addition is in the norm after it."""
    stems = [call.stem for call in jaxllm.explain(jax.grad(loss), params, *batch).calls]
    attention, ffn = ["add_rms_norm", "flash_attention_packed"], ["add_rms_norm", "swiglu_packed"]
    ops = ["embed", *attention, *ffn, "add_rms_norm"]  # the block is in a scan, and traced once
    forward = [f"{op}_forward" for op in ops]
    forward[1:1], forward[4:4] = ["attention_block"], ["ffn_block"]
    backward = [f"{op}_backward" for op in reversed(ops)]
    middle = stems[len(forward) : -len(backward)]
    assert stems == [*forward, *middle, *backward]
    assert all("cross_entropy" in stem for stem in middle)


def test_a_config_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="heads 32 is not a multiple of kv_heads 5"):
        llama3.Llama3Config(kv_heads=5)
    with pytest.raises(ValueError, match="width 4000 is not a multiple of twice heads 32"):
        llama3.Llama3Config(width=4000)
    with pytest.raises(ValueError, match="width 96 is not a multiple of twice heads 32"):
        llama3.Llama3Config(width=96)
    with pytest.raises(ValueError, match="mlp_width is 0"):
        llama3.Llama3Config(mlp_width=0)
    with pytest.raises(ValueError, match=r"rope_theta is -1; it must be above 0"):
        llama3.Llama3Config(rope_theta=-1)
    for name in ("tied_head", "qkv_bias", "qk_norm"):
        wrong: Any = {name: "False"}
        with pytest.raises(TypeError, match=f"{name} has 'False'; it must be a bool"):
            llama3.Llama3Config(**wrong)


def test_tokens_that_do_not_fit_are_refused(params):
    with pytest.raises(ValueError, match=r"sequences of 25; the model has max_seq_len 24"):
        llama3.forward(params, jnp.zeros((2, 25), jnp.int32), CONFIG)
    with pytest.raises(ValueError, match=r"tokens has shape \(25,\); it must be \(B, T\)"):
        llama3.forward(params, jnp.zeros(25, jnp.int32), CONFIG)
    with pytest.raises(TypeError, match="tokens has dtype float32; it must be an integer array"):
        llama3.forward(params, jnp.zeros((2, 8)), CONFIG)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 7\); it must be \(2, 8\)"):
        loss(params, jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 7), jnp.int32))


def test_logits_of_few_tokens_have_a_derivative_under_every_backend(params):
    tokens = jnp.zeros((1, 3), jnp.int32)
    value = lambda p: llama3.forward(p, tokens, CONFIG).sum()  # noqa: E731
    expected = jax.jit(jax.grad(value))(params)
    with jaxllm.use_backend("pallas"):
        actual = jax.jit(jax.grad(value))(params)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= 1e-4
