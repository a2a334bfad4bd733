"""GPT-2: against Hugging Face's, and what holds of it without another to compare with."""

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import ops, training
from jaxllm.convert.huggingface import from_state_dict, to_state_dict
from jaxllm.inference.cache import init_cache, prefill
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, stack, unstack
from jaxllm.testing import error, lower_for_cuda

CONFIG = gpt2.GPT2Config(vocab_size=61, max_seq_len=24, layers=2, heads=2, width=32)
LLAMA3 = llama3.Llama3Config(
    vocab_size=61, max_seq_len=24, layers=2, heads=2, kv_heads=1, width=32, mlp_width=48
)


@pytest.fixture(scope="module")
def params():
    """Random in every array, so that a bias or a scale that is left out shows."""
    params = gpt2.init(jax.random.key(0), CONFIG)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params = tree.unflatten(noisy)
    return params | {"wte": params["wte"].at[CONFIG.vocab_size :].set(0)}


@pytest.fixture(scope="module")
def batch():
    tokens = jax.random.randint(jax.random.key(2), (2, 20), 0, CONFIG.vocab_size)
    labels = jax.random.randint(jax.random.key(3), (2, 20), 0, CONFIG.vocab_size)
    return tokens, labels.at[1, 13:].set(-1)


def loss(params, tokens, labels, **options):
    return gpt2.loss(params, tokens, labels, CONFIG, **options)


logits_of = jax.jit(lambda params, tokens: gpt2.forward(params, tokens, CONFIG))
loss_and_gradients = jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("direction", ["from_state_dict", "to_state_dict"])
def test_logits_loss_and_every_gradient_agree_with_huggingface(
    huggingface, params, batch, direction
):
    torch, transformers = huggingface
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=CONFIG.vocab_size,
        n_positions=CONFIG.max_seq_len,
        n_embd=CONFIG.width,
        n_layer=CONFIG.layers,
        n_head=CONFIG.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).float()
    if direction == "to_state_dict":
        ours = to_state_dict(params, CONFIG)
        model.load_state_dict({name: torch.from_numpy(array) for name, array in ours.items()})
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        theirs = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        params = from_state_dict(theirs, CONFIG)

    tokens, labels = batch
    logits = model(torch.from_numpy(np.array(tokens)).long()).logits
    expected_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(np.array(labels)).long().flatten(), ignore_index=-1
    )
    expected_loss.backward()

    ours = logits_of(params, tokens)[..., : CONFIG.vocab_size]
    assert error(ours, logits.detach().numpy()) <= 1e-4
    value, gradients = loss_and_gradients(params, tokens, labels)
    assert error(value, expected_loss.item()) <= 1e-4
    gradients = to_state_dict(gradients, CONFIG)
    compared = 0
    for name, parameter in model.named_parameters():
        found = error(gradients[name], parameter.grad.numpy())
        assert found <= 1e-4, f"{name}: {found:.3g}"
        compared += 1
    assert compared == 4 + 12 * CONFIG.layers


# Counted by hand: wte and wpe, each layer's 12 D^2 + 13 D, the last norm's 2 D.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("d6", 30_357_504),
        ("d12", 124_475_904),
        ("d24", 354_871_296),
        ("d36", 774_090_240),
        ("d48", 1_557_686_400),
    ],
)
def test_presets_have_the_known_number_of_parameters(name, count):
    assert gpt2.num_params(gpt2.PRESETS[name]) == count


def test_flops_count_the_matrix_products():
    config = gpt2.PRESETS["d12"]
    weights = 12 * 12 * 768**2 + 50304 * 768
    assert gpt2.flops_per_token(config, 1024) == 6 * weights + 12 * 12 * 1024 * 768


def test_the_vocabulary_is_padded_to_a_multiple_of_128():
    assert gpt2.GPT2Config().padded_vocab_size == 50304
    assert gpt2.GPT2Config(vocab_size=256).padded_vocab_size == 256
    assert gpt2.GPT2Config(width=96, heads=4).head_width == 24


def test_init_draws_what_it_says():
    config = gpt2.GPT2Config(vocab_size=1000, max_seq_len=64, layers=8, heads=2, width=128)
    params = gpt2.init(jax.random.key(0), config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    blocks = params["blocks"]
    for weight in (params["wte"][:1000], params["wpe"], blocks["attention"]["qkv"]["weight"]):
        assert float(weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(blocks["mlp"]["down"]["weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(blocks["attention"]["out"]["weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert not params["wte"][1000:].any()
    assert not blocks["mlp"]["up"]["bias"].any()
    assert (params["ln_f"]["scale"] == 1).all()


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (0, TypeError, "key has type int; it must be one of jax.random.key"),
        (jnp.zeros(2), TypeError, "key has dtype float32; it must be one of jax.random.key"),
        (
            np.zeros((3, 2), "uint32"),
            ValueError,
            r"key has shape \(3, 2\); it must be a single key",
        ),
    ],
)
def test_init_takes_one_random_key(key, error, message):
    with pytest.raises(error, match=message):
        gpt2.init(key, CONFIG)


@pytest.mark.parametrize("name", ["init", "flops_per_token", "num_params", "loss"])
@pytest.mark.parametrize("model", [gpt2, llama3])
def test_the_config_of_another_family_is_rejected(name, model):
    wrong = LLAMA3 if model is gpt2 else CONFIG
    arrays = {
        "init": (jax.random.key(0), wrong),
        "flops_per_token": (wrong, 8),
        "num_params": (wrong,),
        "loss": ({}, None, None, "d12"),
    }
    with pytest.raises(TypeError, match=r"config has type .*; it must be (GPT2|Llama3)Config"):
        getattr(model, name)(*arrays[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_dtype_of_the_parameters(params, batch, dtype):
    cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    logits = jax.eval_shape(lambda p: gpt2.forward(p, batch[0], CONFIG), cast)
    assert (logits.shape, logits.dtype) == ((2, 20, 128), jnp.dtype(dtype))
    value = jax.eval_shape(lambda p: loss(p, *batch), cast)
    assert (value.shape, value.dtype) == ((), jnp.float32)


def test_a_fresh_model_guesses_evenly(batch):
    fresh = gpt2.init(jax.random.key(0), CONFIG)
    assert float(loss_and_gradients(fresh, *batch)[0]) == pytest.approx(
        np.log(CONFIG.vocab_size), rel=0.02
    )


def test_a_token_has_no_influence_on_earlier_logits(params, batch):
    tokens, _ = batch
    changed = tokens.at[:, 11].set((tokens[:, 11] + 1) % CONFIG.vocab_size)
    before, after = (logits_of(params, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :11], after[:, :11])
    assert (before[:, 11:, : CONFIG.vocab_size] != after[:, 11:, : CONFIG.vocab_size]).any()


@pytest.mark.parametrize(("remat", "form"), [(True, stack), (False, unstack), (True, unstack)])
def test_remat_and_layers_apart_give_equal_gradients(remat, form, params, batch):
    _, plain = loss_and_gradients(params, *batch)
    again = stack(jax.jit(jax.grad(lambda p: loss(p, *batch, remat=remat)))(form(params)))
    assert jax.tree.structure(plain) == jax.tree.structure(again)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert error(b, a) <= 1e-6


def test_remat_runs_the_blocks_again(params, batch):
    def forwards(params, **options):
        gradient = jax.grad(lambda p: loss(p, *batch, **options))
        return str(jax.make_jaxpr(gradient)(params)).count("tanh")

    assert forwards(params, remat=True) > forwards(params)
    assert forwards(unstack(params), remat=True) > forwards(unstack(params))


def test_attention_adds_up_the_gradient_of_its_projection_s_bias(params, batch):
    stems = {call.stem for call in jaxllm.explain(jax.grad(loss), params, *batch).calls}
    assert "self_attention_backward" in stems
    assert "flash_attention_packed_backward" not in stems


def test_weights_as_they_are_decoded_with_give_equal_logits(params, batch):
    tokens, _ = batch
    transposed = gpt2.forward(for_decoding(params), tokens, CONFIG)
    assert error(transposed, logits_of(params, tokens)) <= 1e-6


def test_padding_has_no_influence(params, batch):
    value, gradients = loss_and_gradients(params, *batch)
    assert not gradients["wte"][CONFIG.vocab_size :].any()
    loud = params | {"wte": params["wte"].at[CONFIG.vocab_size :].set(50.0)}
    loud_value, loud_gradients = loss_and_gradients(loud, *batch)
    assert float(loud_value) == float(value)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(loud_gradients), strict=True):
        assert error(b, a) <= 1e-6


def test_explain_lists_the_fused_gemms_of_a_step(on_hopper):
    config = gpt2.PRESETS["d12"]
    params = jax.eval_shape(
        lambda: training.cast(gpt2.init(jax.random.key(0), config), jnp.bfloat16)
    )
    tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)
    gradients = jax.grad(functools.partial(gpt2.loss, config=config))
    calls = jaxllm.explain(gradients, params, tokens, tokens).calls
    stems = [call.stem for call in calls if call.on_gpu == "cuda"]
    # The blocks are in a scan, and one is traced.
    attention = ["fold_norm", "matmul_bias", "flash_attention_packed_forward"]
    ffn = ["fold_norm", "matmul_bias_gelu", "matmul_residual_norm"]
    first, last = ["embed_forward", "layer_norm_forward"], ["layer_norm_forward"]
    forward = [*first, *attention, "matmul_residual_norm", *ffn, *last]
    of_norm = ["matmul_norm_backward", "fold_norm_backward"]
    attention = ["matmul_delta", "self_attention_backward", "wgrad_pair", "fold_norm", *of_norm]
    ffn = ["fold_norm", "matmul_dgelu", *of_norm]
    backward = ["layer_norm_backward", *ffn, *attention, "embed_backward"]
    middle = stems[len(forward) : -len(backward)]
    assert stems == [*forward, *middle, *backward]
    assert all("cross_entropy" in stem for stem in middle)
    assert [call.stem for call in calls if call.on_gpu == "fused"] == [
        "attention_block",
        "ffn_block",
    ]


def test_auto_makes_the_kernels_of_cuda_on_hopper(on_hopper):
    # At this size GEMMs are fused, and save other arrays than unfused ones.
    config = gpt2.PRESETS["d6"]
    params = jax.eval_shape(
        lambda: training.cast(gpt2.init(jax.random.key(0), config), jnp.bfloat16)
    )
    tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)

    def kernels(backend):
        def gradients(*arrays):
            with jaxllm.use_backend(backend):
                return jax.grad(gpt2.loss)(*arrays, config)

        program = lower_for_cuda(gradients, params, tokens, tokens)
        return Counter(re.findall(r"@jaxllm_(\w+)", program))

    found = kernels("auto")
    gemms = ("bias_gelu", "dgelu", "residual_norm", "norm_backward", "delta")
    assert {f"matmul_{name}" for name in gemms} < set(found)
    assert found == kernels("cuda")


def test_weights_for_decoding_have_norms_that_add(params, batch):
    tokens, _ = batch
    lengths = jnp.full(len(tokens), tokens.shape[1])
    cache = init_cache(CONFIG, len(tokens), tokens.shape[1], jnp.float32)

    def run(params):
        return prefill(gpt2, params, tokens, lengths, CONFIG, cache)[0]

    transposed = for_decoding(params)
    for weights in (params, transposed):
        stems = [call.stem for call in jaxllm.explain(run, weights).calls]
        assert stems.count("add_layer_norm_forward") == 2 * CONFIG.layers
    assert error(run(transposed), run(params)) <= 1e-5


def test_a_config_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="width 768 is not a multiple of heads 7"):
        gpt2.GPT2Config(heads=7)
    with pytest.raises(ValueError, match="layers is 0"):
        gpt2.GPT2Config(layers=0)
    wrong: Any
    for wrong, message in (
        ({"width": 768.0}, "width is 768.0; it must be an integer"),
        ({"heads": "12"}, "heads is '12'; it must be an integer"),
        ({"special_tokens": (None, (), None)}, "special_tokens has type tuple; it must be Special"),
    ):
        with pytest.raises(TypeError, match=message):
            gpt2.GPT2Config(**wrong)


def test_sizes_may_be_integers_of_any_type():
    sizes: Any = {"layers": jnp.int32(6), "heads": np.array(6), "width": np.int64(384)}
    config = gpt2.GPT2Config(**sizes)
    assert config == gpt2.PRESETS["d6"] and hash(config) == hash(gpt2.PRESETS["d6"])
    assert type(config.head_width) is int


@pytest.mark.parametrize("form", [stack, unstack])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": CONFIG.layers + 1}, "params has . layers; it must have ., as config has"),
        (
            {"heads": 2 * CONFIG.heads},
            r"params has a qkv weight of shape \(..., 3, ., .*\); it must",
        ),
        ({"max_seq_len": 25}, "params has 24 positions; config has max_seq_len 25"),
        ({"vocab_size": 2000}, r"params has a wte of \d+ rows; config has vocab_size 2000"),
    ],
)
def test_parameters_of_another_config_are_errors(changes, message, form, params):
    config, tokens = dataclasses.replace(CONFIG, **changes), jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match=message):
        gpt2.forward(form(params), tokens, config)


def test_layers_in_a_tuple_are_an_error(params):
    blocks = tuple(unstack(params)["blocks"])
    with pytest.raises(TypeError, match=r"params\['blocks'\] is a tuple; it must be a list"):
        gpt2.forward(params | {"blocks": blocks}, jnp.zeros((1, 3), jnp.int32), CONFIG)


def test_remat_is_a_bool_or_a_policy(params):
    tokens = jnp.zeros((1, 3), jnp.int32)
    wrong: Any
    for wrong in ("full", jax.checkpoint_policies, 0.5):
        with pytest.raises(TypeError, match=r"remat is .*; it must be a bool, or one of jax.check"):
            gpt2.forward(params, tokens, CONFIG, remat=wrong)

    def program(remat):
        found = jax.make_jaxpr(
            jax.grad(lambda p: gpt2.loss(p, tokens, tokens, CONFIG, remat=remat))
        )
        return "remat" in str(found(params))

    assert program(np.bool_(True)) and program(1) and not program(np.bool_(False))


def test_tokens_that_do_not_fit_are_refused(params):
    with pytest.raises(ValueError, match=r"sequences of 25; the model has max_seq_len 24"):
        gpt2.forward(params, jnp.zeros((2, 25), jnp.int32), CONFIG)
    with pytest.raises(ValueError, match=r"tokens has shape \(25,\); it must be \(B, T\)"):
        gpt2.forward(params, jnp.zeros(25, jnp.int32), CONFIG)
    with pytest.raises(TypeError, match="tokens has dtype float32; it must be an integer array"):
        gpt2.forward(params, jnp.zeros((2, 8)), CONFIG)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 7\); it must be \(2, 8\)"):
        loss(params, jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 7), jnp.int32))
    labels: Any = [[0] * 8] * 2
    with pytest.raises(TypeError, match="labels has type list; it must be an integer array"):
        gpt2.loss(params, jnp.zeros((2, 8), jnp.int32), labels, CONFIG)


def test_logits_of_few_tokens_have_a_derivative_under_every_backend(params):
    tokens = jnp.zeros((1, 3), jnp.int32)
    value = lambda p: gpt2.forward(p, tokens, CONFIG).sum()  # noqa: E731
    expected = jax.jit(jax.grad(value))(params)
    with jaxllm.use_backend("pallas"):
        actual = jax.jit(jax.grad(value))(params)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= 1e-4


@pytest.mark.parametrize(
    ("batch_size", "remat", "rows"), [(32, False, 33618), (3, False, None), (32, True, None)]
)
def test_the_head_takes_more_rows_at_once_where_the_blocks_keep_much(
    monkeypatch, batch_size, remat, rows
):
    found = []

    def loss_of(*_, **options):
        found.append(options)
        return jnp.float32(0)

    monkeypatch.setattr(ops, "linear_cross_entropy", loss_of)
    config = gpt2.PRESETS["d12"]
    weights = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((batch_size, 1024), jnp.int32)
    jax.eval_shape(lambda p, t: gpt2.loss(p, t, t, config, remat=remat), weights, tokens)
    assert [options["chunk_rows"] for options in found] == [rows]
