"""The supported versions of JAX: one pair of bounds, wherever they are written."""

import re
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

from jaxllm.core import versions

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST, NEXT = (".".join(map(str, of)) for of in (versions.OLDEST_JAX, versions.NEXT_JAX))
INTERNALS = re.compile(
    r"\bjax\.(_src|extend|interpreters|__version_info__|make_user_context)\b"
    r"|\bjax\.experimental\.custom_partitioning\b|\beval_jaxpr\b"
)


def minor(version):
    return version[:2]


def before(version):
    """The last release line before a version, such as 0.12 before 0.13."""
    return f"{version[0]}.{version[1] - 1}"


def test_installed_jax_is_supported():
    assert versions.OLDEST_JAX <= minor(jax.__version_info__) < versions.NEXT_JAX


def test_project_asks_for_the_supported_versions():
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *(of for each in extras.values() for of in each)]
    found = {of for of in asked if re.match(r"jax(lib)?\b", of)}
    bounds = f">={OLDEST},<{NEXT}"
    assert found == {f"jax{bounds}", f"jax[cuda12]{bounds}", f"jax[cuda13]{bounds}"}


def test_wheels_are_built_with_the_headers_of_the_oldest_jaxlib():
    major, least = versions.OLDEST_JAX
    assert f"jaxlib>={OLDEST},<{major}.{least + 1}" in PROJECT["build-system"]["requires"]


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("Makefile", [f'"jaxlib>={OLDEST},<{NEXT}"']),
        (".github/workflows/ci.yml", [f'jax: "=={OLDEST}.*"', f'jax: "<{NEXT}"']),
        ("README.md", [f"| JAX | {OLDEST} to {before(versions.NEXT_JAX)} |"]),
        ("docs/install.md", [f"| JAX | {OLDEST} to {before(versions.NEXT_JAX)} |"]),
        ("docs/versions.md", [f"| JAX | {OLDEST} to {before(versions.NEXT_JAX)} |", f"`<{NEXT}`"]),
    ],
)
def test_other_files_name_the_same_versions(path, texts):
    whole = (ROOT / path).read_text()
    for text in texts:
        assert text in whole
    other = re.findall(r"jax(?:lib)?[^\n\"'`]*?<(\d+\.\d+)", whole)
    assert set(other) <= {NEXT}


def test_page_lists_every_file_that_depends_on_parts_of_jax_that_change():
    sources = {
        str(path.relative_to(ROOT))
        for folder in ("jaxllm", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if INTERNALS.search(path.read_text())
    }
    assert sources
    listed = set(re.findall(r"\]\(\.\./([^)#]+\.py)\)", PAGE.read_text()))
    assert sources <= listed, sources - listed


def test_supported_versions_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check(versions.OLDEST_JAX)
        versions.check((*minor(jax.__version_info__), 99))


def test_older_jax_is_an_error():
    with pytest.raises(ImportError, match=rf"jaxllm needs JAX {OLDEST} or newer, .* JAX 0\.9\.1"):
        versions.check((0, 9, 1))


@pytest.mark.parametrize("installed", [versions.NEXT_JAX, (*versions.NEXT_JAX, 1), (1, 0, 0)])
def test_newer_jax_is_a_warning_that_names_the_cap(installed):
    with pytest.warns(UserWarning, match=rf'this is JAX .*install "jax<{NEXT}"'):
        versions.check(installed)
