"""The examples that train models, switch backends and add an op."""

import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import add_your_own_op
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
from pretraining_options import identity, later_identity, make_batch, parse, record_of
from pretraining_scripts import SCRIPTS, read_log

import jaxllm
from jaxllm import data
from jaxllm.convert import huggingface, llmc
from jaxllm.core import ffi
from jaxllm.core.backend import resolve
from jaxllm.data.tokenizer import BYTES
from jaxllm.models import gpt2
from jaxllm.training import checkpoint, parallel

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@SCRIPTS
def test_pretrain_writes_log_curve_and_samples(capsys, script, out):
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
    assert printed.count("--- sample after step") == 2
    assert "\ndef " in printed
    assert printed.rstrip().endswith(f"curve: {out}/loss.png")


def test_pretrain_is_deterministic():
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", np.arange(2000) % 256)
    for out in ("one", "two"):
        pretrain_gpt2.main(["--smoke", "--steps", "3", "--out", out, "--data", "shards"])
    losses = [
        [record["loss"] for record in read_log(Path(out, "log.jsonl"))] for out in ("one", "two")
    ]
    assert losses[0] == losses[1]


def test_pretrain_without_a_tokenizer_prints_ids(capsys):
    Path("shards").mkdir()
    data.write_shard("shards/x_train_0.bin", np.arange(2000) + 1000)
    arguments = ["--smoke", "--data", "shards", "--steps", "2", "--accumulate", "1"]
    pretrain_gpt2.main([*arguments, "--vocab-size", "3000"])
    printed = capsys.readouterr().out
    assert "shards: no validation data" in printed
    assert "\n2999 " in printed  # ids, because there is no tokenizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "no shards found"),
        (["--data", "shards"], "but the vocabulary has 257; pass --vocab-size"),
        (["--data", "shards", "--seq-len", "99"], "one window of 99 needs 100"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--keep-every", "0"], "--keep-every is 0"),
        (["--max-grad-norm", "-1"], "--max-grad-norm is -1.0"),
        (["--max-grad-norm", "nan"], "--max-grad-norm is nan"),
        (["--seed", str(2**70)], f"--seed is {2**70}"),
        (["--lr", "nan"], "peak nan"),
        (["--final-fraction", "2"], "final_fraction 2.0"),
        (["--warmup", "-2"], "--warmup is -2, must be 0 or above"),
        (["--warmup", "9"], "--warmup is 9, must be at most --steps, 8"),
        (["--tokenizer", ""], "tokenizer.json: there is no such file"),
        (["--mesh", ""], "error: mesh '' has ''; it must be like data=2,fsdp=4"),
        (["--weight-decay", "nan"], "--weight-decay is nan, must be 0 or above"),
        (["--weight-decay", "inf"], "--weight-decay is inf, must be finite"),
        (["--weight-decay", "1e300"], "--weight-decay is 1e+300, must be finite"),
        (["--max-loss-z", "nan"], "--max-loss-z is nan, must be above 0"),
        (["--max-norm-z", "-1"], "--max-norm-z is -1.0, must be above 0"),
        (["--float8-counts", "--max-underflow", "nan"], "--max-underflow is nan, must be from 0"),
        (["--float8-counts", "--max-underflow", "5"], "--max-underflow is 5.0, must be from 0"),
        (["--checkpoint-every", "-5"], "--checkpoint-every is -5, must be 0 or above"),
        (["--val-every", "-5"], "--val-every is -5, must be 0 or above"),
        (["--sample-every", "-1"], "--sample-every is -1, must be 0 or above"),
        (["--hellaswag-every", "-1"], "--hellaswag-every is -1, must be 0 or above"),
        (["--heartbeat-timeout", "0"], "--heartbeat-timeout is 0, must be above 0"),
        (
            ["--precision", "up=row,up=tensor"],
            "--precision is 'up=row,up=tensor'; it names 'up' tw",
        ),
        (["--ignore-next-document"], "--ignore-next-document needs --document-mask"),
        (
            ["--document-mask", "--vocab-size", "3000"],
            "the end-of-text token of a vocabulary of 3000 is unknown; pass --tokenizer",
        ),
        (
            ["--document-mask", "--tokenizer", "bytes", "--vocab-size", "256"],
            "--vocab-size is 256; the end-of-text token of the tokenizer bytes is 256",
        ),
        (
            ["--end-of-text", "<|endoftext|>", "--vocab-size", "256"],
            "--vocab-size is 256; the end-of-text token of the tokenizer bytes is 256",
        ),
        (
            ["--tokenizer", "bytes", "--vocab-size", "100", "--prompt", "Az"],
            "--prompt: 'Az' has token 122; the vocabulary has 100",
        ),
        (
            ["--vocab-size", "3000", "--prompt", "a"],
            "--prompt: the tokenizer is unknown; pass --tokenizer",
        ),
        (["--prompt", ""], "--prompt is ''; it must have a token"),
        (["--float8-counts"], "--float8-counts: nothing is rounded to float8 without --precision"),
        (["--max-underflow", "0.1"], "--max-underflow needs --float8-counts"),
        (["--precision", "fp8"], "--precision is 'fp8'; it must be 'row', 'tensor', None"),
        (["--precision", "gate=row"], "--precision names 'gate'; the layers are"),
        (["--precision", "up=row,down"], "--precision['down'] is ''; it must be"),
        (["--data", "other"], "*val*.bin has token 300, but the model has 257"),
        (["--data", "both"], "pretrain_val.bin: a shard of both splits by its name; rename it"),
        (["--out", "eval.bin"], "--out is eval.bin, must be a folder"),
        (
            ["--data", "shards", "--vocab-size", "3000", "--out", "eval.bin/run"],
            "--out is eval.bin/run: Not a directory",
        ),
        (["--hellaswag", "eval.bin"], "eval.bin: questions has token 50000; the model has"),
        (["--hellaswag", "eval.bin", "--seq-len", "5"], "eval.bin: questions has 6 tokens in one"),
    ],
)
def test_pretrain_reports_misuse_in_one_line(capsys, arguments, message):
    for folder in ("shards", "other", "both"):
        Path(folder).mkdir()
    data.write_shard("shards/train.bin", np.arange(1970, 2020))
    data.write_shard("other/train.bin", np.arange(2000) % 256)
    data.write_shard("other/val.bin", np.arange(400) % 301)
    data.write_shard("both/pretrain_val.bin", np.arange(2000) % 256)
    write_questions("eval.bin", [1, 2, 3, 4], [[5, 6, 50000], [7]])
    with pytest.raises(SystemExit) as caught:
        pretrain_gpt2.main(["--smoke", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def write_questions(path, context, completions):
    """Writes an eval file with one question, whose first completion is correct."""
    parts = [word for part in (context, *completions) for word in (len(part), *part)]
    example = [65535, 2 * (len(parts) + 5), 0, 0, len(completions), *parts]
    header = struct.pack("<256i", 20240522, 1, 1, example[1], *[0] * 252)
    Path(path).write_bytes(header + struct.pack(f"<{len(example)}H", *example))


def test_pretrain_reports_backend_errors(monkeypatch):
    def refuse(_):
        assert resolve() == "pallas"
        raise jaxllm.BackendError("no kernel")

    monkeypatch.setattr(pretraining, "train", refuse)
    with pytest.raises(SystemExit, match="no kernel"):
        pretrain_gpt2.main(["--smoke", "--backend", "pallas"])


def test_pretrain_losses_do_not_depend_on_remat():
    losses = {}
    for remat in ("none", "activations", "blocks"):
        options = ["--steps", "3", "--val-every", "0", "--out", remat]
        options += ["--remat", remat] if remat != "none" else []
        pretrain_llama3.main(["--smoke", *options])
        losses[remat] = [record["loss"] for record in read_log(Path(remat, "log.jsonl"))]
    for remat in ("activations", "blocks"):
        np.testing.assert_allclose(losses[remat], losses["none"], rtol=1e-4)


def test_pretrain_with_float8_has_nearly_the_losses_without(capsys):
    def losses(out, *options):
        known = "--smoke --steps 3 --val-every 0 --checkpoint-every 3 --no-tensorboard --out"
        pretrain_llama3.main([*known.split(), out, *options])
        return np.array([record["loss"] for record in read_log(Path(out, "log.jsonl"))])

    recipe = ("--precision", "gate_up=tensor,down=row")
    found, expected = losses("float8", *recipe, "--float8-counts"), losses("plain")
    for record in read_log(Path("float8", "log.jsonl")):
        shares = record["float8_underflow"], record["float8_gradient_underflow"]
        assert max(shares) < 0.01 and record["float8_overflow"] == 0
    assert "with float8 GEMMs (gate_up=tensor, down=row)" in capsys.readouterr().out
    assert 0 < abs(found - expected).max() < 0.02
    with pytest.raises(SystemExit, match=r"of a run with precision .*; this one has None"):
        losses("float8", "--resume")


@SCRIPTS
def test_pretrain_runs_as_a_script_from_anywhere(script, out):
    command = [sys.executable, script.__file__, "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert script.__doc__.splitlines()[0] in run.stdout
    assert all(preset in run.stdout for preset in script.FAMILY.presets)


@pytest.fixture
def ctrl_c():
    """Installs Python's SIGINT handler, because background processes ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(monkeypatch, at_steps):
    """Sends SIGINT to this process when the batches of some steps are made."""
    plain = pretraining.make_batch

    def make_batch(dataset, options, step):
        if step in at_steps:
            signal.raise_signal(signal.SIGINT)
        return plain(dataset, options, step)

    monkeypatch.setattr(pretraining, "make_batch", make_batch)


def test_ctrl_c_ends_the_run_after_the_step(monkeypatch, capsys):
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
        # Not os.kill: the signal may reach another thread, and Python may merge two signals.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("still here")

    monkeypatch.setattr(pretraining, "validate", press_twice)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain_gpt2.main(["--smoke", "--val-every", "2"])
    assert signal.getsignal(signal.SIGINT) is handler
    # The run stopped in the validation of step 2, so the record of step 1 is on disk.
    assert len(read_log(Path("runs/gpt2_tiny/log.jsonl"))) == 1


def test_pretrain_rejects_sequences_that_the_mesh_does_not_divide(monkeypatch, capsys):
    mesh = jax.sharding.AbstractMesh((1, 1, 2, 1), parallel.AXES)
    monkeypatch.setattr("pretraining_options.open_mesh", lambda text: mesh)
    with pytest.raises(SystemExit):
        pretrain_gpt2.main(["--smoke", "--mesh", "context=2", "--seq-len", "33"])
    message = "sequences have 33 tokens; it must be a multiple of 2, the devices of the mesh along"
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"end_of_text": 3}, "of a run with end_of_text 3; this one has 256"),
        ({"config.rope_theta": 1.0}, "of a run with config.rope_theta 1.0; this one has 10000.0"),
        (
            {"train_digest": "0"},
            r"of a run with train_digest 0; this one has [0-9a-f]{16}: shards/.* has other tokens",
        ),
        (
            {"train_digest": "0", "train_files": {"train.bin": "1"}},
            r": 1 of the files shards/\*train\*.bin changed; train.bin differs",
        ),
        (
            {"train_tokens": 0, "train_files": {"old_train.bin": "1"}},
            r"run with train_tokens 0; .*: 2 of the files .* changed; old_train.bin is missing",
        ),
        ({}, None),
    ],
)
def test_pretrain_resumes_runs_of_the_same_documents_and_model(monkeypatch, recorded, message):
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", np.arange(2000) % 256)
    flags = ["--smoke", "--data", "shards", "--document-mask", "--resume"]
    options = parse(flags, pretrain_llama3.FAMILY, None)
    # The records of older runs have none of them.
    of_older_run = {k: v for k, v in identity(options).items() if k not in later_identity(options)}
    assert record_of(options)["train_files"] == {"train.bin": options.train.digest}
    monkeypatch.setattr(checkpoint, "read_record", lambda folder: of_older_run | recorded)
    monkeypatch.setattr(checkpoint, "restore", lambda folder, state: state)
    folder: Any = SimpleNamespace(latest_step=lambda: 2)
    state: Any = SimpleNamespace(step=2)
    fewer = parse([*flags, "--steps", "1"], pretrain_llama3.FAMILY, None)
    with pytest.raises(SystemExit, match=r"--steps is 1; the newest checkpoint in .* is of step 2"):
        pretraining.resume(folder, state, fewer)
    if message is None:
        assert pretraining.resume(folder, state, options) is state
        return
    with pytest.raises(SystemExit, match=message):
        pretraining.resume(folder, state, options)


def smoke(*arguments):
    pretrain_gpt2.main(["--smoke", "--val-every", "0", "--no-tensorboard", *map(str, arguments)])
    return read_log(Path("runs/gpt2_tiny/log.jsonl"))


def test_pretrain_supports_all_options_in_one_run(capsys):
    """A config file, HellaSwag, checkpoints, and llm.c's order, files and log."""
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
    assert len(records) == 5  # the command line wins over the file
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
    # Another run starts from the saved model.
    model = ("--init-from", out / "model.bin", "--dtype", "float32")
    records = smoke(*model, "--data", "shards", "--out", "again", "--steps", 1)
    again = read_log(Path("again/log.jsonl"))[0]["loss"]
    batch = data.batch(data.open_dataset("shards/train.bin"), 4, 32, seed=0, step=0)
    wanted = gpt2.loss(params, jnp.asarray(batch[0]), jnp.asarray(batch[1]), config)
    np.testing.assert_allclose(again, wanted, rtol=1e-5)


def test_pretrain_resumes_where_it_stopped(monkeypatch, capsys):
    whole = smoke("--steps", 6)
    stop = ["--steps", 6, "--checkpoint-every", 2, "--out", "runs/gpt2_tiny"]
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, {3})
        first = smoke(*stop)
    assert len(first) < 6
    with pytest.raises(
        SystemExit, match=r"has checkpoints of a run: pass --resume to continue from step"
    ):
        smoke(*stop)
    # A run without --checkpoint-every must not overwrite the log of those checkpoints either.
    log = Path("runs/gpt2_tiny/log.jsonl").read_bytes()
    with pytest.raises(
        SystemExit, match=r"has checkpoints of a run: pass --resume to continue from step"
    ):
        smoke("--steps", 1)
    assert Path("runs/gpt2_tiny/log.jsonl").read_bytes() == log
    with pytest.raises(SystemExit, match="are of a run with seed 0; this one has 1"):
        smoke(*stop, "--resume", "--seed", 1)
    capsys.readouterr()
    resumed = smoke(*stop, "--resume", "--max-loss-z", 1e9)
    printed = capsys.readouterr().out
    assert f"resuming from step {len(first)}\nwith max_loss_z 1000000000.0, which was" in printed
    assert printed.count("which was") == 1
    assert [(r["step"], r["loss"]) for r in resumed] == [(r["step"], r["loss"]) for r in whole]


@pytest.mark.parametrize("every", [2, 5])
def test_pretrain_saves_the_run_at_a_token_beyond_the_vocabulary(capsys, every):
    """Whether the last step before it was due for a checkpoint or not."""
    tokens = np.arange(2000) % 256
    tokens[4 * 2 * 2 * 32 + 7] = 300  # step 5 has 2 microbatches of 2 rows from here
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", tokens)
    flags = ("--data", "shards", "--order", "llmc", "--checkpoint-every", every, "--steps", 6)
    message = "step 5: .* 257; pass --vocab-size .* 300, at position 519 of .*train.bin"
    for more in ((), ("--resume",)):
        with pytest.raises(SystemExit, match=message):
            smoke(*flags, "--sample-every", 0, *more)
        records = read_log(Path("runs/gpt2_tiny/log.jsonl"))
        assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert "model after step 4" in capsys.readouterr().out
    assert Path("runs/gpt2_tiny/checkpoints/4").is_dir()


def test_pretrain_with_a_document_mask_resumes_where_it_stopped(monkeypatch):
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(3000) < 0.1, BYTES.end_of_text, rng.integers(0, 256, 3000))
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", tokens)
    data.write_shard("shards/val.bin", tokens[:500])
    options = ["--data", "shards", "--steps", 4, "--checkpoint-every", 2]
    masked = [*options, "--document-mask", "--ignore-next-document"]

    def run(out, *flags):
        known = ["--smoke", "--val-every", 0, "--sample-every", 0, "--no-tensorboard"]
        pretrain_gpt2.main([*map(str, (*known, *flags)), "--out", out])
        records = read_log(Path(out, "log.jsonl"))
        return [(record["step"], record["loss"], record.get("val_loss")) for record in records]

    whole = run("whole", *masked)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, {2})
        assert len(run("stopped", *masked)) < 4
    with pytest.raises(SystemExit, match="of a run with document_mask True; this one has None"):
        run("stopped", *options, "--resume")
    assert run("stopped", *masked, "--resume") == whole
    plain = run("plain", "--data", "shards", "--steps", 1)
    assert plain[0][1] != whole[0][1]


def test_pretrain_batches_have_documents_and_ignored_labels():
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", np.arange(2000) % 257)  # 256 is the end-of-text token
    flags = ["--smoke", "--data", "shards", "--document-mask"]
    masked, ignoring = (
        make_batch(options.train, options, 3)
        for options in (
            parse([*flags, *more], pretrain_gpt2.FAMILY, None)
            for more in ([], ["--ignore-next-document"])
        )
    )
    tokens, labels, *documents = masked
    assert tokens.shape == (2, 2, 32)
    assert all(map(np.array_equal, documents, data.find_documents(np.asarray(tokens), 256)))
    assert np.array_equal(ignoring[1], np.where(tokens == 256, -1, labels))
    parts = zip((tokens, *documents), (ignoring[0], *ignoring[2:]), strict=True)
    assert all(np.array_equal(a, b) for a, b in parts)


def test_failed_save_keeps_the_previous_model(monkeypatch):
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


def test_saved_model_includes_its_tokenizer(capsys):
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
    # A run that starts from it keeps its ids, except for the end token with --end-of-text.
    smoke(*flags, "--init-from", model, "--end-of-text", "5", "--out", "runs/on")
    assert huggingface.load_special_tokens("runs/on/model") == (2, (5,), None)


def test_nonfinite_run_stops_and_names_the_tensors(monkeypatch):
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
    # The last checkpoint is of the previous step, which was finite.
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
        ("no-unroll = false", "run.toml: no-unroll is false; write unroll = true"),
        ("# \udcff", "run.toml: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_invalid_config_files_are_rejected(capsys, config, message):
    Path("run.toml").write_text(config, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit) as caught:
        smoke("--config", "run.toml")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which compiles the kernel")
def test_add_your_own_op_example_runs(tmp_path, capsys):
    library = tmp_path / "libsoftsign.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffi, "_loaded", set())  # restored after the test
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


def test_switch_backends_rejects_seeds_out_of_range(capsys):
    with pytest.raises(SystemExit, match="2"):
        switch_backends.main(["--seed", str(2**70)])
    assert f"--seed is {2**70}, must be from -2**63 to 2**63 - 1" in capsys.readouterr().err


def test_switch_backends_prints_losses_or_errors(capsys):
    switch_backends.main(["--smoke", "--explain"])
    parts = capsys.readouterr().out.split("loss by step\n")[1:]
    norm = "add_layer_norm_forward"  # of GPT-2, and of the small network
    for part in parts:
        columns = part.splitlines()[0].split()[1:]
        for backend in switch_backends.BACKENDS:
            refusal = f"did not run: {backend}\n    backend '{backend}' cannot serve"
            assert (backend in columns) != (refusal in part)
        for backend in columns[1:]:
            assert float(part.split(f"    {backend}: ")[1].split()[0]) < 1e-4
        explained = part.split("implementations that auto selects")[1].split("\n")
        assert norm in {line.split()[0] for line in explained if line.strip()}
    # The norms have a Pallas kernel, which runs anywhere.
    assert parts[1].split()[:4] == ["step", "xla", "auto", "pallas"]
