"""The examples that generate text and evaluate models."""

import dataclasses
import functools
import re
from pathlib import Path

import evaluate
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pretrain_gpt2
import pretrain_llama3
import pytest
import small_models
import tokenizers
from pretraining_scripts import SCRIPTS, read_log

import jaxllm
from jaxllm import data
from jaxllm.convert import huggingface
from jaxllm.data.tokenizer import from_file
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import gpt2

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def test_generate_smoke_mode_runs(capsys):
    generate.main(["--smoke", "--temperature", "0", "x = "])
    printed = capsys.readouterr().out
    assert printed.startswith("x = ")
    assert re.search(r"\n8 tokens, [\d,.]+ tokens/s\n$", printed)


@SCRIPTS
@pytest.mark.parametrize("options", [[], ["--int8", "--int8-cache"]], ids=["float", "int8"])
@pytest.mark.covering(("script",), ("options",))
def test_generate_uses_the_newest_model(script, out, options, capsys):
    script.main(["--smoke", "--steps", "2"])
    capsys.readouterr()
    options = [*options, "--group-size", "8"]
    with_options = ["--max-new-tokens", "5", "--temperature", "0", *options, "import "]
    generate.main(with_options)
    first = capsys.readouterr().out
    assert first.startswith(f"model: {out}/model\nimport ")
    assert "\n5 tokens" in first
    generate.main(["--model", f"{out}/model", *with_options])
    again = capsys.readouterr().out
    assert again.rsplit("\n", 2)[0] == first.rsplit("\n", 2)[0]  # without the speed


def test_evaluate_uses_the_newest_model(capsys):
    pretrain_gpt2.main(["--smoke", "--batch-size", "4", "--dtype", "float32"])
    capsys.readouterr()
    shards = ["--data", "runs/gpt2_tiny/data", "--dtype", "float32"]
    losses = evaluate.main([*shards, "--seq-len", "32", "--batch-size", "4", "--batches", "8"])
    printed = capsys.readouterr().out
    record = read_log(Path("runs/gpt2_tiny/log.jsonl"))[-1]
    assert losses["float32"] == pytest.approx(record["val_loss"], rel=1e-5)
    assert 0 < abs(losses["int8"] - losses["float32"]) < 0.01
    perplexities = re.findall(r"(float32|int8): loss ([\d.]+), perplexity ([\d.]+)\n", printed)
    for dtype, loss, perplexity in perplexities:
        assert float(loss) == pytest.approx(losses[dtype], abs=1e-4)
        assert float(perplexity) == pytest.approx(np.exp(losses[dtype]), rel=1e-4)
    assert len(perplexities) == 2
    assert re.search(r"int8 changes the perplexity by [+-]0\.\d{3}%\n$", printed)


def test_evaluate_smoke_mode_runs(capsys):
    losses = evaluate.main(["--smoke", "--batches", "2", "--dtype", "float32"])
    # A random model is close to uniform over the vocabulary.
    assert losses["float32"] == pytest.approx(np.log(257), rel=0.05)
    assert losses["int8"] == pytest.approx(losses["float32"], rel=1e-3)
    assert "int8 changes the perplexity by" in capsys.readouterr().out


@pytest.mark.parametrize("script", [generate, evaluate])
def test_backends_that_cannot_run_end_the_script(script, monkeypatch):
    """On a machine with kernels too: the block raises what an op would."""

    def reject(name):
        raise jaxllm.BackendError(f"backend {name!r} cannot serve embed_forward")

    monkeypatch.setattr(jaxllm, "use_backend", reject)
    with pytest.raises(SystemExit, match="backend 'cuda' cannot serve embed_forward"):
        script.main(["--smoke", "--backend", "cuda"])


@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_llama3])
def test_default_models_can_be_quantized(script):
    family = script.FAMILY
    params = family.model.init(jax.random.key(0), family.presets["tiny"])
    quantized = jax.tree.leaves(quantize_params(params))
    assert any(leaf.dtype == jnp.int8 for leaf in quantized)


def test_evaluate_rejects_invalid_arguments():
    with pytest.raises(SystemExit, match="no model in runs; train one with `make demo`"):
        evaluate.main([])
    config = dataclasses.replace(generate.SMOKE_CONFIG, vocab_size=500)
    huggingface.save("wide", gpt2.init(jax.random.key(0), config), config)
    with pytest.raises(
        SystemExit, match="has 500 tokens, and the default corpus is bytes; pass shards"
    ):
        evaluate.main(["--model", "wide"])
    with pytest.raises(SystemExit, match="no shards found"):
        evaluate.main(["--model", "wide", "--data", "nowhere"])
    Path("shards").mkdir()
    data.write_shard("shards/val.bin", np.arange(50))
    with pytest.raises(SystemExit, match="one window of 64 needs 65"):
        evaluate.main(["--model", "wide", "--data", "shards"])
    data.write_shard("shards/val.bin", np.full(500, 500))
    with pytest.raises(SystemExit, match="has token 500, but the model has 500"):
        evaluate.main(["--model", "wide", "--data", "shards"])


@pytest.mark.parametrize(
    "flag", ["--seq-len=0", "--batch-size=0", "--batches=-1", "--group-size=0"]
)
def test_evaluate_rejects_sizes_out_of_range(capsys, flag):
    with pytest.raises(SystemExit):
        evaluate.parse([flag])
    assert f"{flag.replace('=', ' is ')}, must be at least" in capsys.readouterr().err


def test_evaluate_rejects_group_sizes_before_the_loss_in_float(capsys):
    with pytest.raises(SystemExit, match=r"group_size 48 must divide .*; see --group-size"):
        evaluate.main(["--smoke", "--group-size", "48"])
    assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "run",
    [
        generate.main,
        evaluate.main,
        pretrain_gpt2.main,
        functools.partial(small_models.parse, description=""),
    ],
    ids=["generate", "evaluate", "pretrain", "small_models"],
)
def test_scripts_reject_an_unknown_backend_of_the_environment(monkeypatch, capsys, run):
    monkeypatch.setattr("jaxllm.core.backend._DEFAULT", "gpu")
    with pytest.raises(SystemExit, match="2"):
        run(["--smoke"])
    message = "the environment variable JAXLLM_BACKEND is 'gpu'; it must be one of auto, cuda"
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_generate_rejects_invalid_arguments(tmp_path):
    with pytest.raises(SystemExit, match="no model in runs; train one with `make demo`"):
        generate.main([])
    with pytest.raises(SystemExit, match="nothing: there is no such folder"):
        generate.main(["--model", "nothing"])
    with pytest.raises(SystemExit, match=r"group_size 48 must divide .*; see --group-size"):
        generate.main(["--smoke", "--int8", "--group-size", "48"])
    with pytest.raises(SystemExit, match="prompt has 64 tokens; it must have from 1 to 63"):
        generate.main(["--smoke", 64 * "x"])
    with pytest.raises(SystemExit, match="--max-new-tokens is 0, must be above 0"):
        generate.main(["--smoke", "--max-new-tokens", "0"])
    with pytest.raises(SystemExit, match=r"--seed is 18446744073709551616, must be from -2\*\*63"):
        generate.main(["--smoke", "--seed", str(2**64)])
    with pytest.raises(SystemExit, match="top_p is 2"):
        generate.main(["--smoke", "--top-p", "2"])
    with pytest.raises(SystemExit, match="surrogates not allowed"):
        generate.main(["--smoke", "\udcff"])


def test_pieces_waits_for_complete_characters():
    ids = [*"aé€".encode(), 0xFF, *b"b", 0x80, *"😀".encode(), 0xF0]
    assert list(generate.pieces(ids, generate.BYTES)) == [
        "a",
        "é",
        "€",
        "\N{REPLACEMENT CHARACTER}b",
        "\N{REPLACEMENT CHARACTER}😀",
        "\N{REPLACEMENT CHARACTER}",
    ]


def test_pieces_keeps_the_spaces_of_llama_2_tokenizers(tmp_path):
    """The tokenizer drops the space before the first word of every decoded piece."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁the", "▁cat", "s"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = from_file(tmp_path)
    ids = [
        words.index(word) for word in ("▁the", "▁cat", "s", "<0xE2>", "<0x82>", "<0xAC>", "▁cat")
    ]
    assert list(generate.pieces(ids, tokenizer)) == ["the", " cat", "s", "€", " cat"]


def test_generate_requires_a_matching_tokenizer(tmp_path):
    config = dataclasses.replace(generate.SMOKE_CONFIG, vocab_size=400)
    huggingface.save("wide", gpt2.init(jax.random.key(0), config), config)
    with pytest.raises(
        SystemExit, match=r"no tokenizer\.json, and 400 tokens are neither bytes nor"
    ):
        generate.main(["--model", "wide"])
    generate.main(["--model", "wide", "--tokenizer", "bytes", "--max-new-tokens", "3"])
