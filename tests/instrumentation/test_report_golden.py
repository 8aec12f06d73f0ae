"""A finding of each code as text and as JSON, of the catalogue's programs, against files of tests/data/reports.

``REFENGINE_UPDATE_GOLDEN=1 pytest`` of this file writes them anew. Addresses, paths and times are made the same
everywhere; everything else is compared as it is.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from instrumentation import catalogue, catalogue_source
from instrumentation.reports.jsonlines import as_dict, dump, load
from instrumentation.reports.text import render

GOLDEN = Path(__file__).parents[1] / "data" / "reports" / "codes"
#: a failed reservation is an error, and no finding
CODES = [code for code in catalogue.CATALOGUE if code not in catalogue.NOT_REPORTED and code != "RES002"]
#: where the buffer of a finding lies in the golden files
BASE = 0x12_3400_0000
NEAR = 1 << 20
_TIMES = (
    (re.compile(r"-?\d+\.\d+ s\b"), "N s"),
    (re.compile(r"\d+\.\d+ MiB a minute"), "N MiB a minute"),
    (re.compile(r"\blaunch \d+\b"), "launch N"),
)


@pytest.fixture(scope="module")
def first():
    """The first finding of a code's program; each program runs once."""
    made = {}

    def of(code):
        if code not in made:
            made[code] = catalogue_source.run(code, "bad").findings[0]
        return made[code]

    return of


def plain(text, finding):
    """Text with what differs from run to run made the same, addresses by their distance from the buffer's."""
    start = finding.buffer.address if finding.buffer else 0

    def moved(number):
        return number - start + BASE if start and abs(number - start) < NEAR else number

    text = re.sub(r"0x[0-9a-f]{6,}", lambda match: f"{moved(int(match[0], 16)):#x}", text)
    text = re.sub(r'(?<=": )\d{9,}', lambda match: str(moved(int(match[0]))), text)
    for pattern, wanted in _TIMES:
        text = pattern.sub(wanted, text)
    text = re.sub(r'(?<="launch": )\d+', "0", text)
    # The folder of the programs, as it is written here and there.
    folder = re.escape(catalogue_source.FOLDER.as_posix())
    relative = re.escape(os.path.relpath(catalogue_source.FOLDER).replace(os.sep, "/"))
    return re.sub(f"(?:{folder}|{relative})/", "programs/", text.replace("\\\\", "/"))


def check(name, text):
    path = GOLDEN / name
    if os.environ.get("REFENGINE_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
    assert path.is_file(), f"no golden file {name}: write it with REFENGINE_UPDATE_GOLDEN=1"
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("code", CODES)
class TestEachCode:
    def test_as_text(self, code, first):
        finding = first(code)
        check(f"{code.lower()}.txt", plain(render(finding), finding) + "\n")

    def test_as_json(self, code, first):
        finding = first(code)
        check(f"{code.lower()}.json", plain(json.dumps(as_dict(finding), indent=2), finding) + "\n")

    def test_json_has_all_of_it(self, code, first):
        finding = first(code)
        recorded = load(dump(finding))
        assert recorded.finding == finding
        # The text comes out of the line alone: no source is looked up.
        assert render(recorded.finding, recorded.line_of) == render(finding)


def test_no_golden_file_is_left_over():
    names = {f"{code.lower()}.{kind}" for code in CODES for kind in ("txt", "json")}
    assert {file.name for file in GOLDEN.iterdir()} == names


def test_both_forms_name_launch_owner_and_stream(first):
    for code in ("MEM002", "MEM011", "NUM001"):
        finding = first(code)
        text, line = render(finding), json.loads(dump(finding))
        assert f"launch {line['launch']}, stream {line['stream']}, " in text.replace(
            f"block {finding.block}, thread {finding.thread}, ", ""
        )
        assert line["buffer"]["owner"] == "target"
        assert "y of target" in text


def test_sections_stand_in_the_order_of_a_report(first):
    text = render(first("MEM003"))
    parts = ("MEM003", "Seen at:", "Reserved at:", "Freed at:", "bytes inside the", "Memory around", "Cure:")
    at = [text.index(part) for part in parts]
    assert at == sorted(at)
