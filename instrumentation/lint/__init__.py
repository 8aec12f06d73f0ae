"""A lint for reservations: reports each one whose result is discarded, or used without a check.

It reads source and never imports it: ``python -m instrumentation.lint PATH...``. See ``docs/lint.md``.
"""

from __future__ import annotations

from instrumentation.lint.project import Result, lint_paths, lint_source
from instrumentation.lint.report import Report, render_json, render_text

__all__ = ["Report", "Result", "lint_paths", "lint_source", "render_json", "render_text"]
