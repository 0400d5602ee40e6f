"""Docstrings as mkdocstrings takes them: without roles of reStructuredText, and examples as code."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """An extension for mkdocs.yml."""

    def on_object(self, *, obj: griffe.Object, **context: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            text = re.sub(r":(?:class|func|meth|mod|data):`~?", "`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
