"""The links of the pages, which are relative to the repository, as links of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path

import api_names

DOCS = api_names.ROOT / "docs"
# Files outside docs that are pages of the site, by their path from the root.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}


def rewrite(markdown: str, folder: Path, repository: str | None) -> str:
    """Makes links to files that are no pages links to the repository, or plain text without one.

    Args:
        markdown: The text of a page.
        folder: The folder that its links are relative to.
        repository: The URL of the repository; None or "" if it is not known.
    """

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path = os.path.normpath(folder / target)
        name = os.path.relpath(path, api_names.ROOT)
        if name in ("README.md", "docs"):
            return f"[{text}](README.md)"
        if page := PAGES.get(name):
            return f"[{text}]({page})"
        if text.startswith("`") and (known := in_reference(text.strip("`"), name)):
            return f"[{text}][{known}]"
        if Path(path).is_relative_to(DOCS) and Path(path).suffix in (".md", ".png", ".svg"):
            return f"[{text}]({os.path.relpath(path, DOCS)})"
        return f"[{text}]({repository.rstrip('/')}/blob/main/{name})" if repository else text

    # Blocks of code stay as they are.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    pattern = re.compile(r"\[((?:[^\[\]]|\n)*)\]\(([^()\s]+)\)")
    return "".join(part if part.startswith("```") else pattern.sub(link, part) for part in parts)


def in_reference(text: str, file: str) -> str | None:
    """The path in the reference of a name, or else of its module; None for other files."""
    if not file.endswith(".py"):
        return None
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    known = api_names.links()
    return known.get(f"{module}.{text.rpartition('.')[2]}") or known.get(module)
