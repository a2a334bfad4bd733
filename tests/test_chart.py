"""The chart of the README shows rows of the results."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import chart

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
USE = "{http://www.w3.org/2000/svg}use"


def described(path):
    return json.loads(ElementTree.parse(path).findtext(f".//{DESCRIPTION}") or "")


def positions(path):
    """Where the markers of each implementation are, as (x, y), in the order of the file."""
    groups = ElementTree.parse(path).iterfind(".//*[@id]")
    return {
        group.get("id"): [(float(use.get("x", 0)), float(use.get("y", 0))) for use in uses]
        for group in groups
        if group.get("id") in chart.PEERS and (uses := list(group.iter(USE)))
    }


def test_chart_shows_the_rows_of_the_csv():
    assert described(chart.CHART) == chart.numbers(chart.read()), "python -m benchmarks.chart"


def test_drawing_again_gives_the_same_markers(tmp_path):
    chart.main(["--out", str(tmp_path / "ops.svg")])
    assert described(tmp_path / "ops.svg") == described(chart.CHART)
    drawn, again = positions(chart.CHART), positions(tmp_path / "ops.svg")
    assert drawn.keys() == chart.PEERS.keys()
    for name, points in drawn.items():
        assert len(points) == sum(name in row for row in described(chart.CHART))
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


def test_missing_rows_are_an_error():
    with pytest.raises(ValueError, match="layer_norm 65536x768, forward"):
        chart.numbers([])
