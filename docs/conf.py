"""The documents as a site: ``make docs`` builds them into build/docs."""

from __future__ import annotations

from typing import Any

from refengine import __version__

project = "refengine"
copyright = "the refengine authors"  # noqa: A001 - the name that Sphinx reads
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"refengine {version}"
myst_heading_anchors = 4
# Pages are read in a repository too, where a link to a file beside docs/ leads to it.
suppress_warnings = ["myst.xref_missing"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"


def _escape(_app: Any, _ctx: Any, lines: list[str]) -> None:
    """Stars in the help of options are stars."""
    lines[:] = [line.replace("*", "\\*") for line in lines]


def setup(app: Any) -> None:
    """For Sphinx."""
    for part in ("description", "usage", "options", "arguments", "envvars", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _escape)
