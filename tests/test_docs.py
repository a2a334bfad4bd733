"""The pages in docs: what they point to is there, and their numbers are rows of the results."""

import csv
import re
from pathlib import Path

import kernel_table
import pytest

import jaxllm.ops

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
MEASURED = "| commit | op | case | direction | implementation | us | share of copy |"


@pytest.fixture(scope="module")
def results():
    with (ROOT / "benchmarks" / "results" / "h200.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def links(page):
    return re.findall(r"\[([^\]]*)\]\(([^)]*)\)", page.read_text().replace("\n", " "))


def test_the_table_of_kernels_is_current():
    assert kernel_table.table() == kernel_table.TABLE.read_text(), "python docs/kernel_table.py"


def test_the_table_of_kernels_has_files_for_every_op():
    for name, op in kernel_table.op_objects().items():
        assert kernel_table.targets_of(op), name
        for target in kernel_table.targets_of(op):
            assert len(kernel_table.kernel_files(kernel_table.handlers()[target])) > 1, target


def test_every_op_has_cases_on_three_backends_and_measurements():
    ops = kernel_table.op_objects()
    del ops["flash_attention_float8"]  # the page says why
    for name, op in ops.items():
        assert op.cuda and op.pallas and op.reference, name
        assert kernel_table.cases_of(name), name
        assert kernel_table.rows_of(name), name


def test_the_sources_kernels_have_ops():
    named = {
        op for kernels in kernel_table.SOURCES.values() for ops in kernels.values() for op in ops
    }
    assert named <= set(jaxllm.ops.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_what_they_name(page):
    assert links(page)
    for text, target in links(page):
        file = page.parent / target
        assert file.exists(), target
        if re.fullmatch(r"`\w+`", text):
            assert re.search(rf"\b{text.strip('`')}\b", file.read_text()), (text, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_can_be_reached(page):
    index = ROOT / "docs" / "README.md"
    assert page == index or page.name in [target for _, target in links(index)]


def measured_rows(page):
    """The cells of the rows of tables of measurements."""
    rows = None
    for line in page.read_text().splitlines():
        if line == MEASURED:
            rows = []
        elif rows is not None and line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows is not None:
            yield from rows[1:]  # without the rule below the header
            rows = None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_numbers_are_rows_of_the_results(page, results):
    names = ("commit", "op", "case", "direction", "implementation", "median_us", "share_of_copy")
    known = [[row[name] for name in names] for row in results]
    for row in measured_rows(page):
        assert row in known
