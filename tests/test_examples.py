import dataclasses
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import add_your_own_op
import evaluate
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pretrain_gpt2
import pretrain_llama3
import pretraining
import pytest
import switch_backends
import tokenizers

import jaxllm
from jaxllm import data
from jaxllm.convert import huggingface, llmc
from jaxllm.core import ffi
from jaxllm.core.backend import resolve
from jaxllm.data.tokenizer import from_file
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import gpt2
from jaxllm.training import checkpoint

# The scripts that train, and where they leave what they made.
SCRIPTS = pytest.mark.parametrize(
    ("script", "out"),
    [(pretrain_gpt2, "runs/gpt2_tiny"), (pretrain_llama3, "runs/llama3_tiny")],
    ids=["gpt2", "llama3"],
)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@SCRIPTS
def test_pretrain(capsys, script, out):
    script.main(["--smoke", "--val-every", "4", "--sample-every", "4"])
    out = Path(out)
    records = read_log(out / "log.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert [record["step"] for record in records if "val_loss" in record] == [4, 8]
    logged = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "elapsed"}
    assert all(logged <= set(record) for record in records)
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("a sample after step") == 2
    assert "\ndef " in printed
    assert printed.rstrip().endswith(f"curve: {out}/loss.png")


def test_pretrain_repeats():
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", np.arange(2000) % 256)
    for out in ("one", "two"):
        pretrain_gpt2.main(["--smoke", "--steps", "3", "--out", out, "--data", "shards"])
    losses = [
        [record["loss"] for record in read_log(Path(out, "log.jsonl"))] for out in ("one", "two")
    ]
    assert losses[0] == losses[1]


def test_pretrain_on_other_vocabularies(capsys):
    Path("shards").mkdir()
    data.write_shard("shards/x_train_0.bin", np.arange(2000) + 1000)
    arguments = ["--smoke", "--data", "shards", "--steps", "2", "--accumulate", "1"]
    pretrain_gpt2.main([*arguments, "--vocab-size", "3000"])
    printed = capsys.readouterr().out
    assert "shards: nothing to validate on" in printed
    assert "\n2999 " in printed  # ids, as there is no tokenizer for them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "no shards found"),
        (["--data", "shards"], "but the vocabulary has 257; give --vocab-size"),
        (["--data", "shards", "--seq-len", "99"], "one window of 99 needs 100"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--keep-every", "0"], "--keep-every is 0"),
        (["--max-grad-norm", "-1"], "--max-grad-norm is -1.0"),
        (["--max-grad-norm", "nan"], "--max-grad-norm is nan"),
        (["--seed", str(2**70)], f"--seed is {2**70}"),
        (["--lr", "nan"], "peak nan"),
        (["--final-fraction", "2"], "final_fraction 2.0"),
        (["--warmup", "-2"], "warmup -2"),
        (["--data", "other"], "*val*.bin has token 300, but the model has 257"),
        (["--hellaswag", "eval.bin"], "eval.bin: questions has token 50000; the model has"),
        (["--hellaswag", "eval.bin", "--seq-len", "5"], "eval.bin: questions has one of 6 tokens"),
    ],
)
def test_pretrain_misuse_is_one_sentence(capsys, arguments, message):
    for folder in ("shards", "other"):
        Path(folder).mkdir()
    data.write_shard("shards/train.bin", np.arange(1970, 2020))
    data.write_shard("other/train.bin", np.arange(2000) % 256)
    data.write_shard("other/val.bin", np.arange(400) % 301)
    write_questions("eval.bin", [1, 2, 3, 4], [[5, 6, 50000], [7]])
    with pytest.raises(SystemExit) as caught:
        pretrain_gpt2.main(["--smoke", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def write_questions(path, context, completions):
    """An eval file of llm.c's with one question, of which the first answer is right."""
    parts = [word for part in (context, *completions) for word in (len(part), *part)]
    example = [65535, 2 * (len(parts) + 5), 0, 0, len(completions), *parts]
    header = struct.pack("<256i", 20240522, 1, 1, example[1], *[0] * 252)
    Path(path).write_bytes(header + struct.pack(f"<{len(example)}H", *example))


def test_pretrain_says_which_backend_cannot_serve(monkeypatch):
    def refuse(_):
        assert resolve() == "pallas"
        raise jaxllm.BackendError("no kernel")

    monkeypatch.setattr(pretraining, "train", refuse)
    with pytest.raises(SystemExit, match="no kernel"):
        pretrain_gpt2.main(["--smoke", "--backend", "pallas"])


@pytest.mark.parametrize("remat", ["activations", "blocks"])
def test_pretrain_with_recomputation_changes_little(remat):
    for options in ([], ["--remat", remat]):
        out = ["--out", f"runs/{len(options)}"]
        pretrain_llama3.main(["--smoke", "--steps", "3", "--val-every", "0", *out, *options])
    plain, again = (
        [record["loss"] for record in read_log(Path("runs", out, "log.jsonl"))] for out in "02"
    )
    np.testing.assert_allclose(again, plain, rtol=1e-4)


@SCRIPTS
def test_pretrain_runs_as_a_script_from_anywhere(script, out):
    command = [sys.executable, script.__file__, "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert script.__doc__.splitlines()[0] in run.stdout
    assert all(preset in run.stdout for preset in script.FAMILY.presets)


@pytest.fixture
def ctrl_c():
    """Lets Ctrl-C interrupt, which a process that was started in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(monkeypatch, at_steps):
    """Sends this process a SIGINT while each of the steps is run."""
    plain = pretraining.make_batch

    def make_batch(dataset, options, step):
        if step in at_steps:
            signal.raise_signal(signal.SIGINT)
        return plain(dataset, options, step)

    monkeypatch.setattr(pretraining, "make_batch", make_batch)


def test_ctrl_c_finishes_in_order(monkeypatch, capsys):
    press_ctrl_c(monkeypatch, {4})
    handler = signal.getsignal(signal.SIGINT)
    pretrain_gpt2.main(["--smoke", "--steps", "5000", "--val-every", "0", "--sample-every", "0"])
    out = Path("runs/gpt2_tiny")
    records = read_log(out / "log.jsonl")
    assert 4 <= len(records) < 50
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert (out / "loss.png").is_file()
    printed = capsys.readouterr()
    assert "Ctrl-C again quits" in printed.err
    assert f"{len(records)} steps in" in printed.out
    assert "curve: runs/gpt2_tiny/loss.png" in printed.out
    assert signal.getsignal(signal.SIGINT) is handler


def test_second_ctrl_c_quits(monkeypatch, ctrl_c):
    def press_twice(*_):
        # Not os.kill, which may pick another thread: two signals that Python sees late are one.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still here")

    monkeypatch.setattr(pretraining, "validate", press_twice)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain_gpt2.main(["--smoke", "--val-every", "2"])
    assert signal.getsignal(signal.SIGINT) is handler
    # Step 2 was being validated; what came before it is on disk.
    assert len(read_log(Path("runs/gpt2_tiny/log.jsonl"))) == 1


def smoke(*arguments):
    pretrain_gpt2.main(["--smoke", "--val-every", "0", "--no-tensorboard", *map(str, arguments)])
    return read_log(Path("runs/gpt2_tiny/log.jsonl"))


def test_pretrain_takes_all_of_it(capsys):
    """One run with a config file, HellaSwag, checkpoints, llm.c's order, files and log."""
    rng = np.random.default_rng(0)
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", rng.integers(0, 256, 3000))
    data.write_shard("shards/val.bin", rng.integers(0, 256, 300))
    write_questions("eval.bin", [5, 6], [[i, i + 1] for i in range(4)])
    Path("run.toml").write_text(
        'steps = 4\nschedule = "wsd"\nfinal_fraction = 0.5\nwarmup = 0\nlr = 1.0e-3\n'
        'order = "llmc"\ndata = "shards"\nval-every = 2\nhellaswag = "eval.bin"\n'
        "hellaswag-every = 2\ncheckpoint-every = 2\nsave-llmc = true\nunroll = true\n"
        "max-norm-z = 6\ntensorboard = true\nresume = false\n"
    )
    pretrain_gpt2.main(["--smoke", "--config", "run.toml", "--steps", "5", "--mfu", "matmul"])
    out = Path("runs/gpt2_tiny")
    records = read_log(out / "log.jsonl")
    assert len(records) == 5  # the command line goes before the file
    assert [r["step"] for r in records if "hellaswag" in r] == [2, 4, 5]
    assert [r["step"] for r in records if "val_loss" in r] == [2, 4, 5]
    rates = [r["learning_rate"] for r in records]
    np.testing.assert_allclose(rates[:4], 1e-3, rtol=1e-6)
    assert all(r["mfu"] > 0 for r in records)
    text = (out / "main.log").read_text().splitlines()
    assert text[0].startswith("s:1 trl:") and any(line.startswith("s:2 eval:") for line in text)
    assert any((out / "tensorboard").iterdir())
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"2", "4", "5"}
    params, config = llmc.load_gpt2(out / "model.bin")
    assert (config.vocab_size, config.max_seq_len) == (257, 32)
    assert "HellaSwag" in capsys.readouterr().out
    # What was left is where another run begins.
    model = ("--init-from", out / "model.bin", "--dtype", "float32")
    records = smoke(*model, "--data", "shards", "--out", "again", "--steps", 1)
    again = read_log(Path("again/log.jsonl"))[0]["loss"]
    batch = data.batch(data.open_dataset("shards/train.bin"), 4, 32, seed=0, step=0)
    wanted = gpt2.loss(params, jnp.asarray(batch[0]), jnp.asarray(batch[1]), config)
    np.testing.assert_allclose(again, wanted, rtol=1e-5)


def test_pretrain_goes_on_where_it_stopped(monkeypatch, capsys):
    whole = smoke("--steps", 6)
    stop = ["--steps", 6, "--checkpoint-every", 2, "--out", "runs/gpt2_tiny"]
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, {3})
        first = smoke(*stop)
    assert len(first) < 6
    with pytest.raises(SystemExit, match=r"has checkpoints of a run: --resume goes on from step"):
        smoke(*stop)
    # Nor does a run without checkpoints of its own write over what they belong to.
    log = Path("runs/gpt2_tiny/log.jsonl").read_bytes()
    with pytest.raises(SystemExit, match=r"has checkpoints of a run: --resume goes on from step"):
        smoke("--steps", 1)
    assert Path("runs/gpt2_tiny/log.jsonl").read_bytes() == log
    with pytest.raises(SystemExit, match="are of a run with seed 0; this one has 1"):
        smoke(*stop, "--resume", "--seed", 1)
    capsys.readouterr()
    resumed = smoke(*stop, "--resume", "--max-loss-z", 1e9)
    printed = capsys.readouterr().out
    assert f"going on from step {len(first)}\nwith max_loss_z 1000000000.0, which was" in printed
    assert printed.count("which was") == 1
    assert [(r["step"], r["loss"]) for r in resumed] == [(r["step"], r["loss"]) for r in whole]


def test_a_model_stays_until_the_next_one_is_written(monkeypatch):
    smoke("--steps", 1)
    model = {path.name: path.read_bytes() for path in Path("runs/gpt2_tiny/model").iterdir()}

    def fail(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "write_tensors", fail)
        with pytest.raises(OSError, match="disk full"):
            smoke("--steps", 2)
    left = {path.name: path.read_bytes() for path in Path("runs/gpt2_tiny/model").iterdir()}
    assert left == model
    smoke("--steps", 2)
    assert Path("runs/gpt2_tiny/model/model.safetensors").read_bytes() != model["model.safetensors"]


def test_a_model_has_its_tokenizer_with_it(capsys):
    words = {"<|endoftext|>": 300} | {str(i): i for i in range(300)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save("words.json")
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", np.arange(2000) % 301)
    Path("generation_config.json").write_text('{"bos_token_id": 2, "eos_token_id": [3, 4]}')
    flags = ("--steps", 1, "--data", "shards", "--tokenizer", "words.json")
    smoke(*flags, "--prompt", "5 6")
    generate.main(["--max-new-tokens", "3", "7 8 9"])
    model = Path("runs/gpt2_tiny/model")
    assert f"model: {model}\n7 8 9" in capsys.readouterr().out
    assert huggingface.load_special_tokens(model) == (2, (3, 4), None)
    # One that goes on from it has its ids, but for an end that is named.
    smoke(*flags, "--init-from", model, "--end-of-text", "5", "--out", "runs/on")
    assert huggingface.load_special_tokens("runs/on/model") == (2, (5,), None)


def test_a_run_that_is_not_finite_stops_with_the_tensors_named(monkeypatch):
    plain = pretraining.training.adamw
    monkeypatch.setattr(
        pretraining.training, "adamw", lambda *_, **__: plain(1e30, max_grad_norm=None)
    )
    with pytest.raises(SystemExit) as caught:
        smoke("--steps", 50, "--checkpoint-every", 1)
    message = str(caught.value)
    found = re.search(r"step (\d+): loss .* is not finite", message)
    assert found, message
    step = int(found[1])
    assert "gradient of wte: " in message and "microbatch 0: loss" in message
    # The last checkpoint is of the step before, and it is finite.
    with checkpoint.open_folder("runs/gpt2_tiny/checkpoints") as folder:
        assert checkpoint.steps(folder)[-1] == step - 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("stepz = 4", "run.toml: stepz is not the name of a flag"),
        ("steps = ", "run.toml: "),
        ('steps = "many"', "argument --steps: invalid int value"),
        ('schedule = "square"', "argument --schedule: invalid choice"),
        ("steps = false", "run.toml: steps is false; it takes a value"),
    ],
)
def test_wrong_config_files_are_refused(capsys, config, message):
    Path("run.toml").write_text(config)
    with pytest.raises(SystemExit) as caught:
        smoke("--config", "run.toml")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which compiles the kernel")
def test_add_your_own_op(tmp_path, capsys):
    library = tmp_path / "libsoftsign.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "_loaded", set())  # not for good
        add_your_own_op.main(library)
        with pytest.raises(ValueError, match=r"softsign_forward.*registered already"):
            ffi.load(library, {"softsign_forward": "SoftsignForward"})
        with pytest.raises(AttributeError, match="SoftsignSideways"):
            ffi.load(library, {"softsign_sideways": "SoftsignSideways"})
        if ffi.is_available():
            with pytest.raises(ValueError, match="layer_norm_forward"):
                ffi.load(library, {"layer_norm_forward": "SoftsignForward"})
    printed = capsys.readouterr().out
    assert "xla: right in float32, bfloat16, float16" in printed
    if jax.default_backend() == "gpu":
        assert "cuda: right in float32, bfloat16, float16" in printed
    else:
        assert "the program for one calls softsign_forward and softsign_backward" in printed


def test_switch_backends(capsys):
    switch_backends.main(["--smoke", "--explain"])
    parts = capsys.readouterr().out.split("loss by step\n")[1:]
    norms = ("layer_norm_forward", "add_layer_norm_forward")  # GPT-2's, and the other network's
    for part, norm in zip(parts, norms, strict=True):
        columns = part.splitlines()[0].split()[1:]
        for backend in switch_backends.BACKENDS:
            refusal = f"did not run: {backend}\n    backend '{backend}' cannot serve"
            assert (backend in columns) != (refusal in part)
        for backend in columns[1:]:
            assert float(part.split(f"    {backend}: ")[1].split()[0]) < 1e-4
        explained = part.split("what auto gives")[1].split("\n")
        assert norm in {line.split()[0] for line in explained if line.strip()}
    # The norms have a Pallas kernel, which runs anywhere.
    assert parts[1].split()[:4] == ["step", "xla", "auto", "pallas"]


def test_generate_smoke(capsys):
    generate.main(["--smoke", "--temperature", "0", "x = "])
    printed = capsys.readouterr().out
    assert printed.startswith("x = ")
    assert re.search(r"\n8 tokens, [\d,.]+ tokens/s\n$", printed)


@SCRIPTS
@pytest.mark.parametrize("options", [[], ["--int8", "--int8-cache"]], ids=["float", "int8"])
def test_generate_continues_with_the_model_that_was_trained_last(script, out, options, capsys):
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
    assert again.rsplit("\n", 2)[0] == first.rsplit("\n", 2)[0]  # all but the speed


def test_evaluate_measures_the_model_that_was_trained_last(capsys):
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


def test_evaluate_smoke(capsys):
    losses = evaluate.main(["--smoke", "--batches", "2", "--dtype", "float32"])
    # A random model knows little: of bytes, that some come twice in a row.
    assert losses["float32"] == pytest.approx(np.log(257), rel=0.05)
    assert losses["int8"] == pytest.approx(losses["float32"], rel=1e-3)
    assert "int8 changes the perplexity by" in capsys.readouterr().out


@pytest.mark.parametrize("script", [pretrain_gpt2, pretrain_llama3])
def test_the_model_that_is_trained_by_default_has_an_int8_form(script):
    family = script.FAMILY
    params = family.model.init(jax.random.key(0), family.presets["tiny"])
    quantized = jax.tree.leaves(quantize_params(params))
    assert any(leaf.dtype == jnp.int8 for leaf in quantized)


def test_evaluate_refuses():
    with pytest.raises(SystemExit, match="no model in runs; train one by `make demo`"):
        evaluate.main([])
    config = dataclasses.replace(generate.SMOKE_CONFIG, vocab_size=500)
    huggingface.save("wide", gpt2.init(jax.random.key(0), config), config)
    with pytest.raises(SystemExit, match="has 500 tokens, the default corpus bytes; give --data"):
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


def test_generate_refuses(tmp_path):
    with pytest.raises(SystemExit, match="no model in runs; train one by `make demo`"):
        generate.main([])
    with pytest.raises(SystemExit, match="nothing: there is no such folder"):
        generate.main(["--model", "nothing"])
    with pytest.raises(SystemExit, match=r"group_size 48 must divide .*; see --group-size"):
        generate.main(["--smoke", "--int8", "--group-size", "48"])
    with pytest.raises(SystemExit, match="prompt has 64 tokens; it must have from 1 to 63"):
        generate.main(["--smoke", 64 * "x"])
    with pytest.raises(SystemExit, match="--max-new-tokens is 0, must be above 0"):
        generate.main(["--smoke", "--max-new-tokens", "0"])
    with pytest.raises(SystemExit, match="top_p is 2"):
        generate.main(["--smoke", "--top-p", "2"])
    with pytest.raises(SystemExit, match="surrogates not allowed"):
        generate.main(["--smoke", "\udcff"])


def test_generate_waits_for_the_rest_of_a_character():
    ids = [*"aé€".encode(), 0xFF, *b"b", 0x80, *"😀".encode(), 0xF0]
    assert list(generate.pieces(ids, generate.BYTES)) == [
        "a",
        "é",
        "€",
        "\N{REPLACEMENT CHARACTER}b",
        "\N{REPLACEMENT CHARACTER}😀",
        "\N{REPLACEMENT CHARACTER}",
    ]


def test_generate_keeps_the_spaces_of_a_llama_2(tmp_path):
    """Its tokenizer drops the space before the first word of what it decodes, wherever that is."""
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


def test_generate_takes_no_tokenizer_for_another(tmp_path):
    config = dataclasses.replace(generate.SMOKE_CONFIG, vocab_size=400)
    huggingface.save("wide", gpt2.init(jax.random.key(0), config), config)
    with pytest.raises(
        SystemExit, match=r"no tokenizer\.json, and 400 tokens are neither bytes nor"
    ):
        generate.main(["--model", "wide"])
    generate.main(["--model", "wide", "--tokenizer", "bytes", "--max-new-tokens", "3"])
