"""Pages that are followed step by step: who types what they say sees what they show. Commands elsewhere are current."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from doc_pages import Reader

from cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "refengine/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name not in ("CHANGELOG.md", "findings.md")
)


@pytest.fixture
def programs(tmp_path):
    return tmp_path / "programs"


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.fixture
def checkout(tmp_path):
    """The parts of a checkout that a reader changes or uses."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("refengine", "instrumentation", "cli", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize(("page", "n_commands"), [("tutorial", 5), ("sanitizer", 2)])
def test_page_that_uses_the_checkout(page, n_commands, programs):
    assert Reader(ROOT, ROOT, programs).follow(DOCS / f"{page}.md") == n_commands


def test_programs_that_pages_show_are_those_of_the_examples():
    shown = (DOCS / "sanitizer.md").read_text(encoding="utf-8")
    assert f"```python\n{(ROOT / 'examples' / 'sanitize.py').read_text(encoding='utf-8')}```" in shown
    (kernel,) = re.findall(
        r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(encoding="utf-8"), re.DOTALL
    )
    source = (ROOT / "examples" / "overflow.py").read_text(encoding="utf-8")
    assert all(line in source for line in kernel.splitlines())


@pytest.mark.parametrize(
    ("page", "n_commands"), [("how-to/audit-your-kernels", 5), ("one-source", 1), ("batch-invariance", 1)]
)
def test_page_for_an_empty_folder(page, n_commands, empty, programs):
    assert Reader(empty, ROOT, programs).follow(DOCS / f"{page}.md") == n_commands


@pytest.mark.parametrize(("page", "n_commands"), [("add-a-quantisation", 7), ("add-an-architecture", 6)])
def test_page_that_changes_a_checkout(page, n_commands, checkout, programs):
    assert Reader(checkout, checkout, programs).follow(DOCS / "how-to" / f"{page}.md") == n_commands


def commands():
    """(page, command line) of each ``refengine`` and ``python`` that a page has, in a block or between backquotes."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(
            r"^(?: {4}|\$ )((?:refengine|python) .*)$|`(refengine [a-z].*?)`", text, re.MULTILINE
        ):
            yield page, "".join(line)


def test_commands_of_all_pages_are_current():
    """Their commands, flags and files are there. What is optional stands in brackets."""
    seen = 0
    for page, line in commands():
        at = f"{page.relative_to(ROOT)}: {line}"
        program, *words = shlex.split(re.sub(r"\[.*?\]|\.\.\.", "", line), comments=True)
        if program == "python":
            scripts = [word for word in words if word.endswith(".py") and "/" in word]
            assert all((ROOT / script).exists() for script in scripts), at
            continue
        command: click.Command = main
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            if "/" in words[0] or words[0].isupper():  # golden record/check: both of them, or a place for one
                break
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, at
            command = found
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= flags | {"--help", "-h"}, at
        seen += 1
    assert seen > 40
