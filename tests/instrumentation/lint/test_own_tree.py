"""This project's own source is clean, and stops to be when any one check of a reservation is taken out."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from instrumentation.lint import project, sources
from instrumentation.lint.facts import RESERVING

ROOT = Path(__file__).resolve().parents[3]
TREES = [
    ROOT / name for name in ("refengine", "instrumentation", "cli", "examples") if (ROOT / name).is_dir()
]
READ = {path: sources.read(path) for path in sources.discover(TREES)}
FILES = {path: source for path, source in READ.items() if isinstance(source, sources.Source)}


def reserving_functions():
    found = set(RESERVING)
    for source in FILES.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef) and "Reservation[" in ast.unparse(
                node.returns or ast.Pass()
            ):
                found.add(node.name)
    return found


MAKERS = reserving_functions()


def is_reserving(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS


def checks(tree):
    """(kind, node) of every check: unwrap() of a reserving call, and tests of names that hold one."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        assigned = [n for n in nodes if isinstance(n, ast.Assign) and is_reserving(n.value)]
        names = {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name)}
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "unwrap"
            ):
                held = node.func.value
                if is_reserving(held) or (isinstance(held, ast.Name) and held.id in names):
                    yield "unwrap", node
            elif isinstance(node, ast.If) and names & {
                n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)
            }:
                yield "test", node


def span(text, node):
    """Offsets of a node in the UTF-8 text."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def replaced(text, node, new):
    start, stop = span(text, node)
    return text[:start] + new + text[stop:]


def mutants(path, tree):
    text = path.read_bytes()
    for kind, node in checks(tree):
        where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        if kind == "unwrap":
            start, stop = span(text, node.func.value)
            held = text[start:stop]
            yield f"{where} value for unwrap", replaced(text, node, held + b".value")
            yield f"{where} no unwrap", replaced(text, node, held)
        else:
            start, stop = span(text, node.test)
            test = text[start:stop]
            yield f"{where} no test", replaced(text, node, b"pass")
            yield f"{where} never true", replaced(text, node.test, b"False")
            yield f"{where} assert", replaced(text, node, b"assert not (" + test + b")")
            yield f"{where} inverted", replaced(text, node.test, b"not (" + test + b")")


# The others say nothing about reservations (this lint only talks about them), and would be read again for each mutant.
RELEVANT = {
    path: source for path, source in FILES.items() if source.mentions & MAKERS and path.parent.name != "lint"
}
MUTANTS = [
    pytest.param(path, text, id=name)
    for path, source in RELEVANT.items()
    for name, text in mutants(path, source.tree)
]


def test_own_tree_is_clean():
    assert len(FILES) > 50
    assert [str(report) for report in project.lint_paths(TREES).reports] == []
    assert project.lint_sources(list(RELEVANT.values())) == []


def test_there_are_mutants(capsys):
    kinds = Counter(mutant.id.split(" ", 1)[1] for mutant in MUTANTS)
    with capsys.disabled():
        print(f"\n{len(MUTANTS)} mutants of this project's checks of reservations: {dict(kinds)}")  # noqa: T201
    assert kinds["value for unwrap"] >= 7
    assert kinds["no test"] >= 2


@pytest.mark.parametrize(("path", "text"), MUTANTS)
def test_mutant_is_reported(path, text):
    mutant = sources.parse(text, str(path))
    assert isinstance(mutant, sources.Source), mutant
    reports = project.lint_sources([mutant if each == path else source for each, source in RELEVANT.items()])
    assert [report for report in reports if report.code == "LNT001"]
