import sys

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing import event_accumulator

from jaxllm.training import runlog

RECORDS = [
    {"step": 1, "loss": 11.0, "learning_rate": 6e-4, "grad_norm": 15.347},
    {"step": 2, "loss": 10.5, "learning_rate": 3e-4, "grad_norm": 2.0, "val_loss": 10.25},
    {"step": 10, "loss": 9.0, "learning_rate": 1e-4, "grad_norm": 1.0, "hellaswag": 0.29512},
]
TEXT = """\
s:1 trl:11.0000 lr:0.000600 norm:15.35
s:2 tel:10.2500
s:2 trl:10.5000 lr:0.000300 norm:2.00
s:10 eval:0.2951
s:10 trl:9.0000 lr:0.000100 norm:1.00
"""


def write(folder, records, **options):
    with runlog.open_log(folder, **options) as log:
        for record in records:
            log(record)


def test_log_has_json_lines_and_llmc_lines(tmp_path):
    write(tmp_path / "run", RECORDS)
    assert runlog.read_log(tmp_path / "run" / "log.jsonl") == RECORDS
    assert (tmp_path / "run" / "main.log").read_text() == TEXT


def test_scalars_of_numpy_and_jax_are_written_as_numbers(tmp_path):
    write(tmp_path, [{"step": np.int64(1), "loss": jnp.float32(0.5), "mfu": np.float32(0.25)}])
    assert runlog.read_log(tmp_path / "log.jsonl") == [{"step": 1, "loss": 0.5, "mfu": 0.25}]
    assert (tmp_path / "main.log").read_text() == "s:1 trl:0.5000\n"


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"step": 1, "loss": "0.5"}, ValueError, "record has loss '0.5'; the log can format"),
        ({"step": 1, "note": None}, ValueError, "record has note None; the log can format"),
        ({"loss": 0.5}, ValueError, "record has loss; it must have a step"),
        ({"step": True}, TypeError, "record has step True; it must be an integer"),
        ({"step": 1.5}, TypeError, r"record has step 1\.5; it must be an integer"),
        ({"step": -1}, ValueError, "record has step -1; it must be at least 0"),
    ],
)
def test_a_record_that_fails_is_in_neither_file(tmp_path, record, error, message):
    with pytest.raises(error, match=message):
        write(tmp_path, [record])
    assert not (tmp_path / "log.jsonl").read_text() + (tmp_path / "main.log").read_text()


def test_a_step_may_be_a_float_that_is_an_integer(tmp_path):
    write(tmp_path, [{"step": jnp.float32(3), "loss": 0.5}], tensorboard=False)
    assert (tmp_path / "main.log").read_text() == "s:3 trl:0.5000\n"


def test_open_log_leaves_the_log_if_after_is_negative(tmp_path):
    write(tmp_path, RECORDS)
    with pytest.raises(ValueError, match="after is -1; it must be at least 0"):
        write(tmp_path, [], after=-1)
    assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS


@pytest.mark.parametrize("end", [b"\0\0\0", b'{"step": 11, "lo\xff\xfe'])
def test_log_that_ends_in_other_bytes_is_continued(tmp_path, end):
    write(tmp_path, RECORDS, tensorboard=False)
    for name in ("log.jsonl", "main.log"):
        with (tmp_path / name).open("ab") as file:
            file.write(end)
    assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS
    write(tmp_path, [{"step": 11, "loss": 8.0}], after=10, tensorboard=False)
    assert (tmp_path / "main.log").read_text() == TEXT + "s:11 trl:8.0000\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensorboard": "False"}, "tensorboard has 'False'; it must be a bool"),
        ({"after": 1.5}, r"after is 1\.5; it must be an integer"),
        ({"after": None}, "after is None; it must be an integer"),
    ],
)
def test_open_log_leaves_the_log_if_an_option_is_of_another_type(tmp_path, options, message):
    write(tmp_path, RECORDS)
    with pytest.raises(TypeError, match=message):
        write(tmp_path, [], **options)
    assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS


def test_records_are_flushed_immediately(tmp_path):
    with runlog.open_log(tmp_path) as log:
        log(RECORDS[0])
        assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS[:1]
        assert (tmp_path / "main.log").read_text() == TEXT.splitlines(keepends=True)[0]


def test_open_log_keeps_records_up_to_a_step(tmp_path):
    write(tmp_path, RECORDS)
    # A killed process leaves an incomplete line.
    for name in ("log.jsonl", "main.log"):
        with (tmp_path / name).open("a") as file:
            file.write({"log.jsonl": '{"step": 1', "main.log": "s:1"}[name])
    assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS
    new = {**RECORDS[2], "step": 3}
    write(tmp_path, [new], after=2)
    assert runlog.read_log(tmp_path / "log.jsonl") == [*RECORDS[:2], new]
    wanted = TEXT.splitlines()[:3]
    assert (tmp_path / "main.log").read_text().splitlines() == [*wanted, *runlog.llmc_lines(new)]
    write(tmp_path, RECORDS[:1])
    assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS[:1]


def test_tensorboard_has_the_same_values(tmp_path):
    for _ in range(2):  # a new run replaces the previous run's events
        write(tmp_path, RECORDS)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["tensors"]) == set().union(*RECORDS) - {"step"}
    found = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("loss")]
    assert found == [(r["step"], r["loss"]) for r in RECORDS]


def test_resumed_run_replaces_later_tensorboard_events(tmp_path):
    write(tmp_path, RECORDS)
    again = {**RECORDS[2], "loss": 5.0}
    write(tmp_path, [again], after=2)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("loss")]
    assert found == [(1, 11.0), (2, 10.5), (10, 5.0)]


def test_llmc_line_of_a_record_with_only_a_loss():
    assert runlog.llmc_lines({"step": 3, "loss": 2.0}) == ["s:3 trl:2.0000"]


def test_tensorboard_is_optional(tmp_path, monkeypatch):
    write(tmp_path, RECORDS, tensorboard=False)
    assert not (tmp_path / "tensorboard").exists()
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    write(tmp_path, RECORDS)
    assert not (tmp_path / "tensorboard").exists()
    assert runlog.read_log(tmp_path / "log.jsonl") == RECORDS


@pytest.fixture
def figures(monkeypatch):
    """The saved figures."""
    saved = []
    plain = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *args, **kw: saved.append(figure) or plain(figure, *args, **kw),
    )
    return saved


def curves(figure):
    (axes,) = figure.axes
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_plot_has_training_and_validation_losses(tmp_path, figures):
    runlog.plot_losses(tmp_path / "loss.png", {"": RECORDS}, "a title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert curves(figures[0]) == {
        "training": [[1, 11.0], [2, 10.5], [10, 9.0]],
        "validation": [[2, 10.25]],
    }


def test_smoothed_is_a_bias_corrected_moving_average():
    records = [{"step": 3, "loss": 4.0}, {"step": 4, "loss": 1.0}, {"step": 7, "loss": 1.0}]
    assert runlog.smoothed(records, 0.5) == pytest.approx({3: 4.0, 4: 2.0, 7: 10 / 7})
    assert runlog.smoothed(records[:2], 0.0) == {3: 4.0, 4: 1.0}


def test_command_line_plots_and_compares_runs(tmp_path, figures, capsys):
    logs = {}
    for name, losses in {"one": [4.0, 3.0, 9.0], "two": [4.5, 3.0, 2.0]}.items():
        write(tmp_path / name, [{**RECORDS[0], "step": i, "loss": x} for i, x in enumerate(losses)])
        logs[name] = tmp_path / name / "log.jsonl"
    image = tmp_path / "both.png"
    runs = [f"{name}={path}" for name, path in logs.items()]
    runlog.main([str(image), *runs, "--steps", "2", "--keep", "0.5", "--title", "both"])
    assert image.read_bytes().startswith(b"\x89PNG")
    assert curves(figures[0]) == {
        "one training": [[0, 4.0], [1, 3.0]],
        "two training": [[0, 4.5], [1, 3.0]],
    }
    assert figures[0].axes[0].get_title() == "both"
    printed = capsys.readouterr().out
    assert printed == "two and one: the smoothed losses of 2 steps differ by at most 0.5000\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["log.jsonl"], "log.jsonl is not of the form NAME=LOG"),
        (["one=nowhere.jsonl"], "nowhere.jsonl"),
        (["one=empty.jsonl"], "empty.jsonl has no losses"),
        (["one=1.jsonl", "two=2.jsonl"], "two and one have no step in common"),
        (["one=1.jsonl", "one=2.jsonl"], "two runs have the name one"),
        (["one=1.jsonl", "--keep", "1"], "--keep is 1.0"),
        (["one=1.jsonl", "--steps", "0"], "--steps is 0"),
    ],
)
def test_command_line_rejects_invalid_arguments(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    for step in (1, 2):
        (tmp_path / f"{step}.jsonl").write_text(f'{{"step": {step}, "loss": 2.0}}\n')
    with pytest.raises(SystemExit) as error:
        runlog.main(["image.png", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "image.png").exists()
