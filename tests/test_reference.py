"""The API reference has every public name, and the links of the site lead somewhere."""

import importlib
import inspect
import re

import api_names
import page_links
import pytest

NAVIGATION = (api_names.ROOT / "mkdocs.yml").read_text()
MODULES = [module for page in api_names.PAGES for module in api_names.modules(page)]
PUBLIC = sorted(
    ".".join(path.relative_to(api_names.ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (api_names.ROOT / "jaxllm").rglob("*.py")
    # The families of ops are public by jaxllm.ops, and their modules are not.
    if path.name != "__main__.py" and not path.is_relative_to(api_names.ROOT / "jaxllm" / "ops")
)


def is_defined_in(value, module):
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name):
    module = importlib.import_module(name)
    public = set(getattr(module, "__all__", ())) or {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and is_defined_in(value, name)
    }
    public = {key for key in public if not inspect.ismodule(getattr(module, key))}
    known = api_names.links()
    assert {key for key in public if f"{name}.{key}" not in known} == set()
    text = dict(api_names.reference_pages())
    for key in public:
        path, _, last = known[f"{name}.{key}"].rpartition(".")
        page = next(page for page in api_names.PAGES if path in api_names.modules(page))
        section = text[page].partition(f"::: {path}\n")[2].partition(":::")[0]
        assert f"- {last}\n" in section + "\n", key


def test_every_op_is_in_the_reference():
    from jaxllm import ops

    assert set(ops.__all__) == set(api_names.public_names("jaxllm.ops"))


@pytest.mark.parametrize("module", MODULES)
def test_names_of_the_reference_exist(module):
    for name in api_names.public_names(module):
        assert hasattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("module", MODULES)
def test_full_names_in_docstrings_exist(module):
    source = api_names.path_of(module).read_text()
    for name in re.findall(r":(?:func|class|mod|attr|data|meth):`~?(jaxllm\.[\w.]+)`", source):
        assert find(name) is not None, name


def find(path):
    """The object of a full name; None if there is no such object."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            fields = getattr(found, "__annotations__", {})
            found = getattr(found, part, fields.get(part))
        return found
    return None


def test_roles_become_links_and_literal_blocks_keep_one_colon():
    convert = api_names.to_markdown
    full = convert("See :func:`jaxllm.ops.layer_norm`::\n\n    code", "jaxllm.ops")
    assert full == "See [`jaxllm.ops.layer_norm`][jaxllm.ops.layer_norm]:\n\n    code"
    # A name in a module that is not public, and one that the package exports.
    assert convert(":func:`gelu`", "jaxllm.ops.activation.api.bias_gelu") == (
        "[`gelu`][jaxllm.ops.gelu]"
    )
    assert convert(":func:`init_state`", "jaxllm.training.step.make_train_step") == (
        "[`init_state`][jaxllm.training.init_state]"
    )
    assert convert(":class:`~jaxllm.core.dispatch.Op`", "") == "[`Op`][jaxllm.core.dispatch.Op]"
    assert convert(":func:`jaxllm.ops.nothing`", "jaxllm") == "`jaxllm.ops.nothing`"


def test_simple_tables_become_tables_of_markdown():
    table = "====  =====\n``a``  one\n       more\n``b``  two\n====  =====\n"
    converted = api_names.to_markdown(table, "jaxllm")
    assert converted == "| | |\n|---|---|\n| ``a`` | one more |\n| ``b`` | two |\n"


def test_links_to_sources_become_links_of_the_site():
    def rewrite(markdown, repository=None):
        return page_links.rewrite(markdown, page_links.DOCS, repository)

    assert rewrite("[Plan](plan.md), ![x](images/ops.svg)") == (
        "[Plan](plan.md), ![x](images/ops.svg)"
    )
    assert rewrite("[`explain`](../jaxllm/core/backend.py)") == (
        "[`explain`][jaxllm.core.backend.explain]"
    )
    assert rewrite("[examples](../examples/README.md)") == "[examples](examples.md)"
    assert rewrite("[Readme](../README.md)") == "[Readme](README.md)"
    assert rewrite("[`Pack`](../cuda/common/vector.cuh)") == "`Pack`"
    assert rewrite("[`Pack`](../cuda/common/vector.cuh)", "https://host.example/jaxllm/") == (
        "[`Pack`](https://host.example/jaxllm/blob/main/cuda/common/vector.cuh)"
    )
    assert rewrite("```\n[a](../b)\n```") == "```\n[a](../b)\n```"


def test_navigation_has_every_page():
    listed = set(re.findall(r": ([\w/]+\.md)$", NAVIGATION, re.MULTILINE))
    pages = {path.name for path in page_links.DOCS.glob("*.md")}
    pages |= {f"reference/{name}.md" for name in api_names.PAGES}
    pages |= set(page_links.PAGES.values())
    assert pages == listed
