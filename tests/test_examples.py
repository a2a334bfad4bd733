import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxllm
from jaxllm import data
from jaxllm.backend import resolve

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks a class's module up
    spec.loader.exec_module(module)
    return module


pretrain_gpt2 = load("pretrain_gpt2")
switch_backends = load("switch_backends")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pretrain(capsys):
    pretrain_gpt2.main(["--smoke", "--val-every", "4", "--sample-every", "4"])
    out = Path("runs/gpt2_tiny")
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
    assert printed.rstrip().endswith("curve: runs/gpt2_tiny/loss.png")


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
    ],
)
def test_pretrain_misuse_is_one_sentence(capsys, arguments, message):
    Path("shards").mkdir()
    data.write_shard("shards/train.bin", np.arange(1970, 2020))
    with pytest.raises(SystemExit) as caught:
        pretrain_gpt2.main(["--smoke", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_pretrain_says_which_backend_cannot_serve(monkeypatch):
    def refuse(_):
        assert resolve() == "pallas"
        raise jaxllm.BackendError("no kernel")

    monkeypatch.setattr(pretrain_gpt2, "train", refuse)
    with pytest.raises(SystemExit, match="no kernel"):
        pretrain_gpt2.main(["--smoke", "--backend", "pallas"])


def press_ctrl_c(monkeypatch, at_steps):
    """Sends this process a SIGINT while each of the steps is run."""
    plain = pretrain_gpt2.make_batch

    def make_batch(dataset, options, step):
        if step in at_steps:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(dataset, options, step)

    monkeypatch.setattr(pretrain_gpt2, "make_batch", make_batch)


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


def test_second_ctrl_c_quits(monkeypatch):
    def press_twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("still here")

    monkeypatch.setattr(pretrain_gpt2, "validate", press_twice)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain_gpt2.main(["--smoke", "--val-every", "2"])
    assert signal.getsignal(signal.SIGINT) is handler
    # Step 2 was being validated; what came before it is on disk.
    assert len(read_log(Path("runs/gpt2_tiny/log.jsonl"))) == 1


def test_switch_backends(capsys):
    switch_backends.main(["--smoke", "--explain"])
    parts = capsys.readouterr().out.split("loss by step\n")[1:]
    for part in parts:
        columns = part.splitlines()[0].split()[1:]
        for backend in switch_backends.BACKENDS:
            refusal = f"did not run: {backend}\n    backend '{backend}' cannot serve"
            assert (backend in columns) != (refusal in part)
        for backend in columns[1:]:
            assert float(part.split(f"    {backend}: ")[1].split()[0]) < 1e-4
        assert "add_layer_norm_forward" in part.split("what auto gives")[1]
    # The norms have a Pallas kernel, which runs anywhere.
    assert parts[1].split()[:4] == ["step", "xla", "auto", "pallas"]
