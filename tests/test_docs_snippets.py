"""Pieces of programs that pages show: each runs where it says that it stands."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from engines import DATA, TARGET, Bench
from fake_cublas import blas_device

import refengine
from cli.main import main
from instrumentation import Sanitizer, blas
from instrumentation.findings import RefusedError
from instrumentation.handles import LibraryHandle
from instrumentation.levels import Level

DOCS = Path(__file__).resolve().parent.parent / "docs"


def fragment(page: str, first: str) -> str:
    """The indented lines of a page that begin with a line that holds ``first``."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = [
        block for block in re.findall(r"(?:^ {4}.*\n)+", text, re.MULTILINE) if first in block.split("\n")[0]
    ]
    assert len(found) == 1, found
    return re.sub("^ {4}", "", found[0], flags=re.MULTILINE)


def run(source: str, **names):
    exec(compile(source, "page", "exec"), names)  # noqa: S102 - a piece of a page of this project
    return names


def test_host_access():
    bench = Bench(Level.AUDIT, threads=1)
    view = bench.put(bench.arena(), np.arange(4, dtype=np.float32), "logits")
    names = {
        "stream": bench.stream, "device": bench.device, "view": view, "logits": np.zeros(4, np.float32),
    }  # fmt: skip
    copied, used, waited, used_again = fragment("order", "stream.copy_out").splitlines()
    assert "STR013: nobody has waited" in used
    with pytest.raises(RefusedError) as refused:
        run(f"{copied}\n{used}", **names)
    assert refused.value.finding.code == "STR013"
    run(f"{waited}\n{used_again}", **names)
    assert names["logits"].tolist() == [0, 1, 2, 3]


def test_a_library_handle():
    bench = Bench(Level.AUDIT, device=blas_device())
    arena = bench.arena()
    x, weight = np.eye(4, dtype=np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
    y = bench.put(arena, np.zeros((4, 3), np.float32), "y")
    names = run(
        fragment("ownership", "handle = LibraryHandle"),
        LibraryHandle=LibraryHandle, blas=blas, device=bench.device, target=TARGET, stream=bench.stream,
        workspace=bench.put(arena, np.zeros(1 << 16, np.uint8), "workspace"),
        x=bench.put(arena, x, "x"), weight=bench.put(arena, weight, "weight"), y=y,
    )  # fmt: skip
    assert np.array_equal(bench.get(y), x @ weight.T)
    names["handle"].destroy()


def test_requests_in_one_context():
    prompts = [[5, 6, 7], [8, 9]]
    source = fragment("scheduling", "engine = refengine.load").replace("400", "4").replace("1024", "128")
    names = run(source, refengine=refengine, path=DATA / "qwen35.gguf", prompts=prompts)
    with names["engine"]:
        assert len(names["texts"]) == 2


def test_rows_of_the_ledger(capsys):
    with Sanitizer(device="host") as san:
        san.array(np.zeros(10, np.float32), name="mine")
        run(fragment("sanitizer", "for row in san.allocator"), san=san)
    assert "mine 40 " in capsys.readouterr().out


def test_a_file_of_settings(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (DOCS / "reference" / "cli.md").read_text(), re.DOTALL)
    file = tmp_path / "settings.toml"
    file.write_text(text)
    assert CliRunner().invoke(main, ["soak", "--config", str(file), "--help"]).exit_code == 0
    file.write_text(text.replace("parallel", "parallels"))
    assert CliRunner().invoke(main, ["soak", "--config", str(file), "--help"]).exit_code == 2


@pytest.mark.parametrize("page", sorted(DOCS.glob("**/*.md")), ids=lambda page: page.stem)
def test_what_python_of_a_page_imports_is_there(page):
    for source in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                ("instrumentation", "refengine")
            ):
                module = importlib.import_module(str(node.module))
                for each in node.names:
                    there = hasattr(module, each.name)
                    assert there or importlib.import_module(f"{node.module}.{each.name}"), each.name
