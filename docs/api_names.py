"""The public names of jaxllm, read from its sources, and the pages of the API reference.

Nothing is imported: the reference is built in an environment without JAX.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The pages: the modules that each lists, `*` for the modules of a package that are not private.
PAGES = {
    "jaxllm": ("jaxllm",),
    "ops": ("jaxllm.ops",),
    "nn": ("jaxllm.nn",),
    "models": ("jaxllm.models.*",),
    "training": ("jaxllm.training", "jaxllm.training.*"),
    "inference": ("jaxllm.inference.*",),
    "data": ("jaxllm.data", "jaxllm.data.*"),
    "convert": ("jaxllm.convert.*",),
    "export": ("jaxllm.export",),
    "testing": ("jaxllm.testing",),
    "core": ("jaxllm.core.*",),
}


def path_of(module: str) -> Path:
    """The source file of a module or a package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def modules(page: str) -> list[str]:
    """The modules of a page, in order; without those that have no public name."""
    found = []
    for name in PAGES[page]:
        if name.endswith(".*"):
            package = name.removesuffix(".*")
            files = sorted(path_of(package).parent.glob("[!_]*.py"))
            found += [f"{package}.{file.stem}" for file in files]
        else:
            found.append(name)
    return [module for module in found if public_names(module)]


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


@functools.cache
def imported(module: str) -> dict[str, str]:
    """The names that a module imports from jaxllm as they are, with the module of each."""
    return {
        alias.name: node.module or ""
        for node in _tree(module).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxllm")
        for alias in node.names
        if not alias.asname
    }


@functools.cache
def public_names(module: str) -> tuple[str, ...]:
    """The public names of a module: `__all__`, or what it defines without an underscore.

    Without modules, and without what the package of the module has in its own `__all__`.
    """
    defined, listed = [], None
    for node in _tree(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                elements = target.elts if isinstance(target, ast.Tuple) else [target]
                names = [element.id for element in elements if isinstance(element, ast.Name)]
                if names == ["__all__"] and node.value is not None:
                    listed = ast.literal_eval(node.value)
                defined += names
    names = defined if listed is None else listed
    package = module.rpartition(".")[0]
    exported = imported(package) if package and path_of(package).exists() else {}
    return tuple(
        dict.fromkeys(
            name
            for name in names
            if not name.startswith("_")
            and exported.get(name) != module
            and not path_of(f"{module}.{name}").exists()
        )
    )


def paths(module: str) -> list[str]:
    """The paths of a module and of its public names."""
    return [module, *(f"{module}.{name}" for name in public_names(module))]


@functools.cache
def links() -> dict[str, str]:
    """Every path that a docstring may name, with the path that the reference has it under."""
    found = {}
    for page in PAGES:
        for module in modules(page):
            found |= {path: path for path in paths(module)}
            for name in public_names(module):
                if source := imported(module).get(name):
                    found[f"{source}.{name}"] = f"{module}.{name}"
    return found


def resolve(name: str, scope: str) -> str | None:
    """The path in the reference for a name in a docstring; None if the reference lacks it.

    Args:
        name: As the docstring has it, such as `layer_norm` or `jaxllm.ops.layer_norm`.
        scope: The path of the documented object; its parents are searched from the inside.
    """
    if name.startswith("jaxllm"):
        return links().get(name)
    while scope:
        if path := links().get(f"{scope}.{name}"):
            return path
        scope = scope.rpartition(".")[0]
    return links().get(f"jaxllm.ops.{name}")


def reference_pages() -> Iterator[tuple[str, str]]:
    """The pages of the reference: a name, and Markdown for mkdocstrings."""
    for page in PAGES:
        title = "jaxllm" if page == "jaxllm" else f"jaxllm.{page}"
        lines = [f"# {title}", ""]
        for module in modules(page):
            # A page of one module has its name as the title.
            heading = "false" if modules(page) == [title] else "true"
            lines += [f"::: {module}", "    options:", f"      show_root_heading: {heading}"]
            lines += ["      members:", *(f"      - {name}" for name in public_names(module)), ""]
        yield page, "\n".join(lines)


def to_markdown(docstring: str, scope: str) -> str:
    """Converts the reST in a docstring to Markdown: roles, formulas, tables, literal blocks."""

    def role(match: re.Match[str]) -> str:
        name = match[2].lstrip("~")
        path = resolve(name, scope)
        shown = f"`{name.rpartition('.')[2] if match[2].startswith('~') else name}`"
        return f"[{shown}][{path}]" if path else shown

    text = re.sub(r"\.\. math::\n((?:[ \t]+\S.*\n?)+)", _formula, docstring)
    text = re.sub(r":math:`([^`]*)`", lambda match: _mathml(match[1], "inline"), text)
    text = re.sub(r":(func|class|mod|meth|attr|data):`([^`]*)`", role, text)
    text = re.sub(r"^(=+(?: +=+)+)\n(.*?)^\1$", _table, text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _formula(match: re.Match[str]) -> str:
    mathml = _mathml(" ".join(match[1].split()), "block")
    return f'\n<div style="overflow-x: auto">{mathml}</div>\n'


def _mathml(formula: str, display: str) -> str:
    from latex2mathml.converter import convert

    # Words, such as softmax, are upright; a name of two letters may be a product.
    words = r"(?<![\\A-Za-z])(?<!begin\{)(?<!end\{)[A-Za-z]{3,}"
    return convert(re.sub(words, r"\\mathrm{\g<0>}", formula), display=display)


def _table(match: re.Match[str]) -> str:
    """A simple table of reST, whose second column may go on in the next line."""
    start = match[1].index(" =") + 1
    rows: list[list[str]] = []
    for line in match[2].splitlines():
        first, second = line[:start].strip(), line[start:].strip()
        if first or not rows:
            rows.append([first, second])
        else:
            rows[-1][1] += f" {second}"
    return "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])
