"""The command line: files found, input refused, forms of output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

from instrumentation.lint import lint_paths, lint_source
from instrumentation.lint.__main__ import main

DROPPED = "arena.reserve(1)\n"


def run(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_clean_is_0_and_says_how_many_files(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    result = run(tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "1 files read, 0 reports\n")


def test_reported_is_1_one_sorted_line_each(tmp_path):
    (tmp_path / "b.py").write_text(DROPPED)
    (tmp_path / "a.py").write_text("\n" * 9 + DROPPED + DROPPED)
    result = run(tmp_path / "b.py", tmp_path)
    assert result.exit_code == 1
    places = [line.split(" LNT001 ")[0] for line in result.stdout.splitlines()]
    assert places == [f"{tmp_path / 'a.py'}:10:1:", f"{tmp_path / 'a.py'}:11:1:", f"{tmp_path / 'b.py'}:1:1:"]


def test_json(tmp_path):
    (tmp_path / "a.py").write_text(DROPPED)
    result = run("--format", "json", tmp_path)
    (report,) = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (report["path"], report["line"], report["column"]) == (str(tmp_path / "a.py"), 1, 1)
    assert report["code"] == "LNT001"
    assert json.loads(run("--format", "json", tmp_path.parent / "absent").stdout)[0]["code"] == "LNT000"


def test_json_of_nothing_is_an_empty_array(tmp_path):
    (tmp_path / "a.py").write_text("")
    assert json.loads(run("--format", "json", tmp_path).stdout) == []


def test_extra_names():
    text = "acquire(1)\npool.acquire(1)\n"
    assert not lint_source(text).reports
    assert [report.line for report in lint_source(text, reserving=["acquire"]).reports] == [1, 2]


def test_extra_names_on_the_command_line(tmp_path):
    (tmp_path / "a.py").write_text("pool.acquire(1)\npool.get(1)\n")
    assert len(run("--reserving", "acquire", "--reserving", "get", tmp_path).stdout.splitlines()) == 2


@pytest.mark.parametrize("arguments", [[], ["--format", "xml", "."], ["--nothing"]])
def test_bad_usage_is_2(arguments):
    assert run(*arguments).exit_code == 2


def test_annotation_of_one_file_counts_in_another(tmp_path):
    (tmp_path / "maker.py").write_text("def make() -> Reservation[Buffer]: ...\n")
    user = tmp_path / "user.py"
    user.write_text("from maker import make as get\nget()\n")
    assert [report.line for report in lint_paths([tmp_path]).reports] == [2]
    assert not lint_paths([user]).reports


def test_class_of_another_file_decides_what_reserve_is(tmp_path):
    (tmp_path / "table.py").write_text(
        "class Table:\n    def reserve(self, n: int) -> None:\n        self.n = n\n"
    )
    user = tmp_path / "user.py"
    user.write_text("def f(table: Table):\n    table.reserve(1)\n")
    assert not lint_paths([tmp_path]).reports
    assert len(lint_paths([user]).reports) == 1


def test_folders_that_are_no_source_are_left_out(tmp_path):
    for folder in (".venv", "__pycache__", ".hidden", "env", "package/inner"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(DROPPED)
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / ".hidden.py").write_text(DROPPED)
    (tmp_path / "notes.txt").write_text(DROPPED)
    result = lint_paths([tmp_path])
    assert [report.path for report in result.reports] == [str(tmp_path / "package" / "inner" / "a.py")]


def test_each_file_once_and_named_files_always(tmp_path):
    hidden = tmp_path / ".hidden.py"
    hidden.write_text(DROPPED)
    script = tmp_path / "script"
    script.write_text(DROPPED)
    (tmp_path / "a.py").write_text(DROPPED)
    result = lint_paths([tmp_path, tmp_path / "a.py", hidden, script, tmp_path])
    assert result.n_files == 3
    assert len(result.reports) == 3


@pytest.mark.skipif(
    not hasattr(os, "symlink") or os.name == "nt", reason="symbolic links need rights on Windows"
)
def test_link_to_the_folder_itself_ends(tmp_path):
    (tmp_path / "a.py").write_text(DROPPED)
    (tmp_path / "loop").symlink_to(tmp_path)
    assert lint_paths([tmp_path]).n_files == 1


BAD = {
    "syntax error": b"def f(:\n",
    "unclosed": b"x = (\n",
    "not utf-8": b"x = '\xff\xfe'\n",
    "unknown encoding": b"# coding: nope\n",
    "null byte": b"x = 1\0\n",
    "utf-16": "arena.reserve(1)".encode("utf-16"),
    "binary": bytes(range(256)) * 10,
    "parentheses": b"x = " + b"(" * 5000 + b")" * 5000,
    "signs": b"x = " + b"-" * 100_000 + b"1\n",
    "sum": b"x = " + b" + ".join([b"1"] * 50_000) + b"\narena.reserve(1)\n",
    "attributes": b"arena.reserve(1)" + b".a" * 20_000,
    "elif chain": b"r = arena.reserve(1)\nif r == 0: pass\n" + b"elif r == 1: pass\n" * 5000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_input_that_cannot_be_parsed_is_one_line_and_2(tmp_path, data):
    (tmp_path / "bad.py").write_bytes(data)
    (tmp_path / "good.py").write_text(DROPPED)
    result = run(tmp_path)
    assert result.exit_code == 2
    bad, good = result.stdout.splitlines()
    assert bad.startswith(f"{tmp_path / 'bad.py'}:")
    assert " LNT000 cannot be parsed: " in bad
    assert " LNT001 " in good


def test_large_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("instrumentation.lint.sources.MAX_BYTES", 10)
    (tmp_path / "a.py").write_text(DROPPED)
    assert "has more than 10 bytes" in run(tmp_path).stdout


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"# comment", b"\xef\xbb\xbf", b'"""Text."""', b"x = 1"],
    ids=["empty", "line", "comment", "mark", "docstring", "no line end"],
)
def test_small_files_are_clean(tmp_path, data):
    (tmp_path / "a.py").write_bytes(data)
    assert run(tmp_path).exit_code == 0


def test_declared_encoding_and_byte_order_mark(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# coding: latin-1\nx = '\xe9'; arena.reserve(1)\n")
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfarena.reserve(1)\n")
    assert [(report.line, report.column) for report in lint_paths([tmp_path]).reports] == [(2, 10), (1, 1)]


def test_invalid_escapes_raise_no_warning():
    assert not lint_source(r"x = '\d'").reports


def test_missing_path_and_pipe(tmp_path):
    paths = [tmp_path / "absent.py"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.py")
        paths.append(tmp_path / "pipe.py")
    results = []
    thread = threading.Thread(target=lambda: results.append(lint_paths(paths)), daemon=True)
    thread.start()
    thread.join(30)
    (result,) = results
    assert result.exit_code == 2
    assert [report.code for report in result.reports] == ["LNT000"] * len(paths)


@pytest.mark.skipif(os.name == "nt", reason="such names do not exist there")
def test_name_with_a_line_break_stays_on_one_line(tmp_path):
    (tmp_path / "a\nb.py").write_text(DROPPED)
    assert len(run(tmp_path).stdout.splitlines()) == 1


NESTED = {
    "for": "for x in y:",
    "while": "while x():",
    "if": "if x():",
    "with": "with x():",
}


@pytest.mark.parametrize("head", NESTED.values(), ids=NESTED)
def test_deep_nesting_is_analysed(head):
    lines = [" " * depth + head for depth in range(60)]
    text = "\n".join([*lines, " " * 60 + "arena.reserve(1)", ""])
    assert [report.line for report in lint_source(text).reports] == [61]


def test_deep_finally_is_analysed_in_reasonable_work():
    depth = 19
    lines = [" " * d + "try:" for d in range(depth)] + [" " * depth + "r = arena.reserve(1)"]
    for d in reversed(range(depth)):
        lines += [" " * d + "finally:", " " * (d + 1) + "g()"]
    assert [report.line for report in lint_source("\n".join(lines)).reports] == [depth + 1]


def test_wrappers_of_wrappers():
    wrappers = "".join(f"def w{n}(arena):\n    return w{n - 1}(arena)\n" for n in range(1, 9))
    text = f"{wrappers}w8(arena)\ndef w0(arena):\n    return arena.reserve(1)\n"
    assert [report.line for report in lint_source(text).reports] == [17]


def test_module_runs_and_imports_neither_numba_nor_the_linted_code(tmp_path):
    marker = tmp_path / "imported"
    (tmp_path / "a.py").write_text(f"open({str(marker)!r}, 'w')\narena.reserve(1)\n")
    result = subprocess.run(
        [sys.executable, "-m", "instrumentation.lint", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'a.py'}:2:1: LNT001 ")
    assert not marker.exists()
    heavy = "import sys, instrumentation.lint; print(sorted({'numba', 'numpy', 'llvmlite', 'cuda'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
