"""An extension of griffe: the reST in jaxllm's docstrings becomes Markdown with links."""

from __future__ import annotations

from typing import Any

import api_names
import griffe


class Roles(griffe.Extension):
    """Converts each docstring once, when its object is loaded."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Converts the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = api_names.to_markdown(obj.docstring.value, obj.path)

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Converts the docstring of the package itself, which is not one of griffe's objects."""
        self.on_object(obj=pkg)
