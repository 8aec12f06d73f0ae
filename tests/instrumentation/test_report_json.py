"""Findings as JSON lines: exact both ways, and whatever a file holds one clear line."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumentation.catalogue import CATALOGUE
from instrumentation.errors import BadInputError
from instrumentation.findings import BufferFacts, Finding, Frame, MemoryWindow
from instrumentation.reports import jsonlines
from instrumentation.reports.jsonlines import MAX_LINE_NBYTES, SCHEMA, as_dict, dump, load, read, write
from instrumentation.reports.sarif import sarif
from instrumentation.reports.text import render

ADDRESS = st.integers(0, (1 << 64) - 1)
COUNT = st.integers(0, 1 << 40)
TEXT = st.text(max_size=30)
FRAME = st.builds(Frame, TEXT, st.integers(0, 1 << 20), TEXT)
STACK = st.lists(FRAME, max_size=3).map(tuple)
BUFFER = st.builds(BufferFacts, TEXT, TEXT, ADDRESS, st.integers(1, 1 << 40))
POSITION = st.tuples(COUNT, COUNT, COUNT)


@st.composite
def windows(draw):
    address = draw(st.integers(0, 1 << 60))
    data = draw(st.binary(min_size=1, max_size=100))
    first = draw(st.integers(address, address + len(data) - 1))
    return MemoryWindow(address, data, first, draw(st.integers(first + 1, first + 1000)))


@st.composite
def findings(draw):
    made = Finding(
        code=draw(st.sampled_from(sorted(CATALOGUE))),
        message=draw(st.text(min_size=1, max_size=50)),
        kind=draw(TEXT),
        size=draw(st.none() | COUNT),
        offset=draw(st.none() | st.integers(-(1 << 40), 1 << 40)),
        buffer=draw(st.none() | BUFFER),
        actor=draw(st.none() | TEXT),
        access=draw(STACK),
        previous=draw(STACK),
        allocation=draw(STACK),
        free=draw(STACK),
        window=draw(st.none() | windows()),
        device=draw(st.none() | TEXT),
        kernel=draw(st.none() | TEXT),
        launch=draw(st.none() | COUNT),
        source=draw(st.none() | FRAME),
        column=draw(st.none() | COUNT),
        argument=draw(st.none() | TEXT),
        block=draw(st.none() | POSITION),
        thread=draw(st.none() | POSITION),
        stream=draw(st.none() | TEXT),
        notes=tuple(draw(st.lists(TEXT, max_size=3))),
        count=draw(st.integers(1, 1 << 40)),
    )
    neighbour = draw(st.none() | BUFFER)
    if neighbour is not None and not (made.source is not None and made.offset is None):
        made = replace(made, neighbour=neighbour, reached_neighbour=draw(st.booleans()))
    return made


@given(findings())
def test_a_finding_comes_back_as_it_was(finding):
    line = dump(finding, lambda file, line: f"{file} {line}")
    assert "\n" not in line
    assert line.isascii()
    recorded = load(line)
    assert recorded.finding == finding
    assert dump(recorded.finding, recorded.line_of) == line
    assert render(recorded.finding, recorded.line_of)
    assert json.dumps(sarif([recorded.finding]), allow_nan=False)


def test_every_field_of_a_finding_is_known():
    finding = Finding(code="MEM001", message="x")
    known = (
        *jsonlines._ALWAYS, *jsonlines._TEXTS, *jsonlines._NUMBERS, *jsonlines._STACKS, *jsonlines._BUFFERS,
        *jsonlines._POSITIONS, "count", "source", "window", "notes", "reached_neighbour",
    )  # fmt: skip
    assert sorted(known) == sorted(field.name for field in fields(finding))


def test_source_lines_go_with_the_finding():
    finding = Finding(code="MEM006", message="never given back", access=(Frame("lost.py", 3, "main"),))
    line = dump(finding, lambda file, line: f"    take({file!r}, {line})\n")
    recorded = load(line)
    assert recorded.finding == finding
    assert "lost.py:3 in main\n      take('lost.py', 3)" in render(recorded.finding, recorded.line_of)


def test_nothing_that_a_file_names_is_opened(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("do not show\n")
    finding = Finding(code="MEM006", message="x", access=(Frame(str(secret), 1, "f"),))
    recorded = load(dump(finding, lambda *_: ""))
    assert "do not show" not in render(recorded.finding, recorded.line_of)


def test_files_are_read_line_by_line():
    made = [Finding(code=code, message="x") for code in ("MEM001", "MEM002")]
    text = io.StringIO()
    write(made, text)
    source = io.BytesIO(text.getvalue().replace("\n", "\r\n\n").encode())
    assert [each.finding for each in read(source, "file")] == made
    assert list(read(io.BytesIO(b""), "file")) == []


LINE = as_dict(
    Finding(
        code="MEM002",
        message="damaged",
        size=4,
        offset=-3,
        buffer=BufferFacts("y", "target", 4096, 400),
        neighbour=BufferFacts("z", "target", 8192, 4),
        access=(Frame("a.py", 1, "f"),),
        window=MemoryWindow(4096, b"\x01\x02", 4097, 4098),
        block=(1, 2, 3),
    ),
    lambda *_: "",
)
WRONG = [
    (b"\xff\xfe", "no JSON"),
    (b"{", "no JSON"),
    (b"nan", "no JSON"),
    (b'{"schema": NaN}', "NaN is no number"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000, "nested too deeply"),
    (b"1" * 10_000, "no JSON"),
    (b'"\\ud800"', "the line is"),
    (b"[]", "the line is []; want one object"),
    (b"null", "the line is None; want one object"),
    (b"{}", f"schema is None; want '{SCHEMA}'"),
    (b'{"schema": "refengine.finding/2"}', "schema is 'refengine.finding/2'"),
    (b'{"schema": 1, "schema": 2}', "a field stands there twice"),
    ({"code": "MEM999"}, "code is 'MEM999'; want a code"),
    ({"code": ""}, "code is ''; want text that is not empty"),
    ({"code": ["MEM001"]}, "code is ['MEM001']; want text"),
    ({"message": ""}, "message is ''"),
    ({"message": None}, "message is None"),
    ({"kind": ""}, "kind is ''"),
    ({"sizes": 1}, "a field of the line is 'sizes'; want one of code, message"),
    ({"size": -1}, "size is -1; want a whole number from 0"),
    ({"size": True}, "size is True"),
    ({"size": 1.5}, "size is 1.5"),
    ({"size": 1 << 70}, "size is 1180591620717411303424"),
    ({"offset": -(1 << 70)}, "offset is -11805"),
    ({"offset": None}, "offset is None"),
    ({"count": 0}, "count is 0; want a whole number from 1"),
    ({"stream": 3}, "stream is 3; want text"),
    ({"notes": "x"}, "notes is 'x'; want a list"),
    ({"notes": [1]}, "notes is 1; want text"),
    ({"access": {}}, "access is {}; want a list"),
    ({"access": [[]]}, "access is []; want an object of file, line, function, source"),
    ({"access": [{"file": "a", "line": "1", "function": "f"}]}, "access.line is '1'"),
    ({"access": [{"file": "a", "line": 1}]}, "access.function is None"),
    ({"access": [{"file": "a", "line": 1, "function": "f", "x": 1}]}, "a field of access is 'x'"),
    ({"buffer": 5}, "buffer is 5; want an object of name, owner, address, nbytes"),
    ({"buffer": {"name": "y", "owner": "t", "address": 0, "nbytes": 0}}, "buffer.nbytes is 0"),
    ({"block": [1, 2]}, "block is [1, 2]; want three whole numbers"),
    ({"block": [1, 2, "3"]}, "block is '3'"),
    ({"reached_neighbour": 1}, "reached_neighbour is 1; want true or false"),
    ({"window": {"address": 1, "data": "0", "first": 1, "stop": 2}}, "window.data is '0'"),
    ({"window": {"address": 1, "data": "0g", "first": 1, "stop": 2}}, "window.data is '0g'; want pairs"),
    ({"window": {"address": 9, "data": "00", "first": 1, "stop": 2}}, "window.first is 1"),
    ({"window": {"address": 1, "data": "00", "first": 5, "stop": 6}}, "window.first is 5"),
    ({"window": {"address": 1, "data": "00", "first": 1, "stop": 1}}, "window.first is 1"),
]


@pytest.mark.parametrize(("change", "wanted"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_one_clear_line(change, wanted):
    line = change if isinstance(change, bytes) else json.dumps(LINE | change).encode()
    with pytest.raises(BadInputError) as caught:
        list(read(io.BytesIO(b"\n" + line + b"\n"), "found.jsonl"))
    text = str(caught.value)
    assert text.startswith("found.jsonl, line 2: ")
    assert wanted in text
    assert len(text) < 700
    assert "\n" not in text


def test_a_neighbour_of_nothing():
    given = {name: value for name, value in LINE.items() if name not in ("offset", "neighbour")}
    assert load(json.dumps(given)).finding.neighbour is None
    with pytest.raises(BadInputError, match="reached_neighbour is True; want no such field"):
        load(json.dumps(given | {"reached_neighbour": True}))
    source = {"neighbour": LINE["neighbour"], "source": {"file": "k.py", "line": 1, "function": "k"}}
    with pytest.raises(BadInputError, match="offset is None; want a whole number"):
        load(json.dumps(given | source))


def test_lines_without_an_end_are_not_read_whole():
    class Endless(io.RawIOBase):
        taken = 0

        def readline(self, size=-1):
            assert 0 < size <= MAX_LINE_NBYTES + 1
            self.taken += size
            return b"x" * size

    source = Endless()
    with pytest.raises(BadInputError, match=f"file, line 1: more than {MAX_LINE_NBYTES} bytes"):
        list(read(source, "file"))
    assert source.taken == MAX_LINE_NBYTES + 1


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(sorted(LINE)),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.lists(st.integers() | st.text(), max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "file", "line", "address", "data"]),
            st.integers() | st.text(),
            max_size=3,
        ),
        max_size=4,
    )
)
def test_whatever_stands_in_a_field(change):
    """It is read, and then printed in every form, or refused in one line."""
    try:
        recorded = load(json.dumps(LINE | change))
    except BadInputError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either way is right
    else:
        assert render(recorded.finding, recorded.line_of)
        assert sarif([recorded.finding])


class TestSarif:
    def test_what_the_schema_requires_is_there(self):
        finding = Finding(
            code="MEM011",
            message="too far",
            access=(Frame("/elsewhere/a b.py", 7, "main"),),
            allocation=(Frame("/elsewhere/c.py", 9, "main"),),
            source=Frame("/elsewhere/kernel.py", 3, "k"),
            column=5,
            kernel="k",
            launch=4,
            stream="compute",
            buffer=BufferFacts("y", "target", 4096, 400),
            notes=("the store was dropped",),
            count=3,
        )
        made = sarif([finding, replace(finding, source=None), Finding(code="MEM006", message="lost")])
        assert made["version"] == "2.1.0"
        (run,) = made["runs"]
        driver = run["tool"]["driver"]
        assert driver["name"] == "refengine"
        assert [rule["id"] for rule in driver["rules"]] == ["MEM006", "MEM011"]
        one, two, three = run["results"]
        for result in (one, two, three):
            assert result["message"]["text"]
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        place = one["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "file:///elsewhere/kernel.py"
        assert place["region"] == {"startLine": 3, "startColumn": 5}
        assert (
            two["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "file:///elsewhere/a%20b.py"
        )
        assert three["locations"] == []
        assert one["occurrenceCount"] == 3
        assert one["properties"] == {
            "owner": "target", "buffer": "y", "kernel": "k", "launch": 4, "stream": "compute",
        }  # fmt: skip
        assert one["relatedLocations"][0]["message"] == {"text": "allocation"}
        assert "the store was dropped" in one["message"]["text"]

    def test_files_below_the_working_folder_are_relative(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        finding = Finding(code="MEM006", message="x", access=(Frame(str(tmp_path / "a" / "b.py"), 1, "f"),))
        (result,) = sarif([finding])["runs"][0]["results"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a/b.py"

    def test_nothing_found(self):
        assert sarif([])["runs"][0]["results"] == []


def test_a_file_of_too_many_lines(monkeypatch):
    monkeypatch.setattr(jsonlines, "MAX_LINES", 3)
    line = (dump(Finding(code="MEM006", message="x")) + "\n").encode()
    assert len(list(read(io.BytesIO(line * 3), "file"))) == 3
    with pytest.raises(BadInputError, match="file: more than 3 lines; split it"):
        list(read(io.BytesIO(line * 4), "file"))
