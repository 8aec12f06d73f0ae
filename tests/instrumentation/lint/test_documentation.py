"""The examples of docs/lint.md are what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from instrumentation.lint import lint_source

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "lint.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def test_examples_are_found():
    assert len(EXAMPLES) >= 9
    assert sum(example.count("# reported") for example in EXAMPLES) >= 15


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"example-{n}" for n in range(len(EXAMPLES))])
def test_example(example):
    marked = [number for number, line in enumerate(example.splitlines(), 1) if line.endswith("# reported")]
    reports = lint_source(re.sub(r"\s*# reported$", "", example, flags=re.MULTILINE)).reports
    assert sorted({report.line for report in reports}) == marked, [str(report) for report in reports]
