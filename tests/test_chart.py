"""The charts show rows of the results."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import chart

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
USE = "{http://www.w3.org/2000/svg}use"


def described(path):
    return json.loads(ElementTree.parse(path).findtext(f".//{DESCRIPTION}") or "")


def positions(path, names):
    """Where the markers of each name are, as (x, y), in the order of the file."""
    groups = ElementTree.parse(path).iterfind(".//*[@id]")
    return {
        group.get("id"): [(float(use.get("x", 0)), float(use.get("y", 0))) for use in uses]
        for group in groups
        if group.get("id") in names and (uses := list(group.iter(USE)))
    }


CHARTS = pytest.mark.parametrize(
    ("path", "names"), [(chart.CHART, chart.PEERS), (chart.SCALING_CHART, chart.GPUS)]
)


def test_charts_show_the_rows_of_the_csv():
    assert described(chart.CHART) == chart.numbers(chart.read()), "python -m benchmarks.chart"
    assert described(chart.SCALING_CHART) == chart.scaling(chart.read(chart.SHARDED))


@CHARTS
def test_drawing_again_gives_the_same_markers(path, names, tmp_path):
    chart.main(["--out", str(tmp_path)])
    assert described(tmp_path / path.name) == described(path)
    drawn, again = positions(path, names), positions(tmp_path / path.name, names)
    assert drawn.keys() == names.keys()
    for name, points in drawn.items():
        assert len(points) == sum(name in row for row in described(path))
        for point, other in zip(points, again[name], strict=True):
            assert point == pytest.approx(other, abs=0.5)


def test_numbers_are_of_one_commit_and_newest():
    rows = chart.read()
    for *key, label in chart.ROWS:
        shown = next(row for row in chart.numbers(rows) if row["label"] == label)
        times = {
            (row["commit"], row["implementation"], row["median_us"])
            for row in rows
            if [row[name] for name in ("op", "case", "dtype", "direction")] == key
        }
        for name in shown.keys() - {"label", "commit"}:
            assert (shown["commit"], name, shown[name]) in times


def test_chart_includes_what_is_slower():
    assert any(
        float(row[name]) < float(row["cuda"])
        for row in chart.numbers(chart.read())
        for name in row.keys() & chart.PEERS.keys()
    )


def test_chart_has_no_text_as_outlines():
    assert re.search(r"<text[^>]*>softmax", chart.CHART.read_text())


def test_scaling_is_that_of_the_rows_of_one_commit():
    def row(gpus, mesh, tokens, commit="a"):
        fields = {"model": "gpt2_d12", "implementation": "jaxllm", "axes": "auto" if mesh else ""}
        fields |= {"mesh": mesh, "gpus": gpus, "tokens_per_s": tokens, "commit": commit}
        return fields | {"processes": "1"}

    several = [row("2", f"{axis}=2", "150") for _, axis, _ in chart.SCALING]
    rows = [row("1", "", "90"), row("1", "", "110"), *several, row("2", "data=2", "200", "b")]
    others = [
        fields | {"model": model}
        for model in {model for model, *_ in chart.SCALING}
        for fields in rows
    ]
    for shown in chart.scaling(others):
        assert (shown["2"], shown["commit of 2"]) == ("0.750", "a")
        assert "4" not in shown
    with pytest.raises(ValueError, match="one GPU was not measured for GPT-2"):
        chart.scaling(several)
    with pytest.raises(ValueError, match="several GPUs were not measured for GPT-2"):
        chart.scaling(rows[:2])


def test_missing_rows_are_an_error():
    with pytest.raises(ValueError, match="layer_norm 65536x768, forward"):
        chart.numbers([])


def test_out_must_be_a_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        chart.main(["--out", str(tmp_path / "file")])
    assert "it must be a folder" in capsys.readouterr().err
