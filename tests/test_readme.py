"""The README: its examples run, and its numbers are rows of the results."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import chart
from jaxllm import testing
from jaxllm.models import gpt2

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def run_example(index):
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(examples[index], str(README), "exec"), names)
    return names


def table(header):
    """The cells of the table that begins with this header, row by row."""
    rows = README.read_text().partition(header + "\n")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


@pytest.fixture(scope="module")
def results():
    rows = []
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        rows += chart.read(path)
    return rows


def times_of(rows, commit):
    """The times at a commit, in microseconds."""
    steps = [1000 * float(row["step_ms"]) for row in rows if row.get("step_ms")]
    medians = [float(row["median_us"]) for row in rows if row.get("median_us")]
    assert steps or medians, commit
    return steps + medians


def is_among(shown, times, unit=1.0):
    """Whether a time rounds to a number as it is shown."""
    half = 0.5 * 10.0 ** -len(shown.partition(".")[2])
    return any(abs(time / unit - float(shown)) <= half + 1e-9 for time in times)


def test_first_example_runs(capsys):
    names = run_example(0)
    for name, like in (("dx", "x"), ("dscale", "scale"), ("dbias", "bias")):
        assert names[name].shape == names[like].shape
        assert np.isfinite(names[name].astype("float32")).all()
    assert "layer_norm_backward" in capsys.readouterr().out


def test_multi_gpu_example_is_correct():
    names = run_example(1)
    config = names["config"]
    params = gpt2.init(jax.random.key(0), config)
    shape = (2 * jax.device_count(), config.max_seq_len)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    labels = jnp.roll(tokens, -1, axis=1)
    expected = jax.value_and_grad(gpt2.loss)(params, tokens, labels, config)
    batch = jax.device_put((tokens, labels), names["batch"])
    found = names["loss_and_gradients"](params, *batch)
    testing.assert_close(found, expected, "float32")


def test_readme_has_at_most_250_lines():
    assert len(README.read_text().splitlines()) <= 250


def test_links_resolve():
    targets = re.findall(r"\]\(([^)]*)\)", README.read_text())
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_readme_shows_the_chart():
    assert f"]({chart.CHART.relative_to(ROOT)})" in README.read_text()


def test_performance_table_has_rows_of_the_results(results):
    rows = table("| workload | card | commit | jaxllm | other | |")
    assert len(rows) == 6
    for workload, _, commit, ours, other, _ in rows:
        times = times_of([row for row in results if row["commit"] == commit], commit)
        for shown in (ours, other):
            assert is_among(shown, times, 1000), (workload, shown)
        assert float(ours) < float(other)


def test_losses_are_rows_of_the_results(results):
    rows = table("| what | jaxllm | other | card, commit |")
    assert rows
    for what, ours, others, where in rows:
        commit = where.split(", ")[1]
        op = re.match(r"`(\w+)`", what)
        assert op, what
        of_op = [row for row in results if row["commit"] == commit and row.get("op") == op[1]]
        for shown in (ours, *re.findall(r"\d[\d.]*", others)):
            assert is_among(shown, times_of(of_op, commit)), (what, shown)
        assert all(float(other) < float(ours) for other in re.findall(r"\d[\d.]*", others))


def test_every_op_is_in_the_table():
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in table("| op | |")))
    from jaxllm import ops

    functions = {name for name in ops.__all__ if name[0].islower()}
    assert functions - {"residual", "final_norm", "count_float8"} == set(named)
