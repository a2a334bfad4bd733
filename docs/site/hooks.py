"""Hooks of mkdocs: the pages of the API reference, and links to files outside docs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import api_names  # noqa: E402
import page_links  # noqa: E402


def on_files(files: Files, config: Any) -> None:
    """Adds the pages that are not in docs."""
    for name, text in api_names.reference_pages():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for path, page in page_links.PAGES.items():
        text = page_links.rewrite((ROOT / path).read_text(), (ROOT / path).parent, config.repo_url)
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrites the links of a page of docs."""
    source = page.file.abs_src_path
    if not source:  # a generated page
        return markdown
    return page_links.rewrite(markdown, Path(source).parent, config.repo_url)


def on_post_build(config: Any) -> None:
    """Fails if the reference lacks a public name."""
    for name in api_names.PAGES:
        html = Path(config.site_dir, "reference", name, "index.html").read_text()
        paths = [path for module in api_names.modules(name) for path in api_names.paths(module)]
        if missing := [path for path in paths if f'id="{path}"' not in html]:
            raise PluginError(f"the page of {name} in the reference lacks {', '.join(missing)}")
