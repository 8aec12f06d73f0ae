"""The catalogue's programs do what it says, and it says what this version reports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from instrumentation import catalogue, catalogue_page, catalogue_source
from instrumentation.catalogue import CATALOGUE, NOT_REPORTED, entry, status
from instrumentation.errors import BadInputError
from instrumentation.findings import RefusedError
from instrumentation.levels import Level

ROOT = Path(__file__).resolve().parents[2]
REPORTED = [code for code in CATALOGUE if code not in NOT_REPORTED]


def constructed(tree):
    """Codes that stand in a source as whole strings, except where a log is only asked for them."""
    asked = {
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "of"
        for argument in node.args
    }
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in asked)
    return {node.value for node in strings if isinstance(node.value, str) and node.value in CATALOGUE}


class TestWhatIsReported:
    def test_the_declared_codes_are_those_that_no_source_constructs(self):
        found = set()
        # Those of the drill are what a fault is to be reported as.
        others = (catalogue_source.FOLDER, ROOT / "refengine" / "drill")
        for package in ("instrumentation", "refengine", "cli"):
            for file in (ROOT / package).rglob("*.py"):
                if not file.name.startswith("catalogue") and file.parent not in others:
                    found |= constructed(ast.parse(file.read_text(encoding="utf-8")))
        assert CATALOGUE.keys() - found == NOT_REPORTED

    def test_the_search_sees_what_makes_a_finding_and_not_what_asks_for_one(self):
        tree = ast.parse('Finding(code="MEM001" if left else "MEM002"); refuse("STR001", log.of("MEM006"))')
        assert constructed(tree) == {"MEM001", "MEM002", "STR001"}

    def test_status(self, monkeypatch):
        monkeypatch.setattr(catalogue, "NOT_REPORTED", frozenset({"RES003"}))
        assert status("RES003") == "This version does not report it yet."
        assert status("MEM002") == ""

    def test_status_of_what_is_reported_in_part(self, monkeypatch):
        monkeypatch.setattr(catalogue, "PARTLY_REPORTED", {"GRA001": "This version reports a free."})
        assert status("GRA001") == "This version reports a free."


class TestPrograms:
    def test_every_code_has_a_program_with_its_twin(self):
        names = {f"{code.lower()}_{kind}.py" for code in CATALOGUE for kind in ("bad", "fixed")}
        assert {file.name for file in catalogue_source.FOLDER.glob("*.py")} == names | {"__init__.py"}

    @pytest.mark.parametrize("code", REPORTED)
    def test_a_program_is_reported_first_as_its_code(self, code):
        outcome = catalogue_source.run(code, "bad")
        assert outcome.code == code
        # What a program keeps is what it raised.
        if isinstance(outcome.error, RefusedError):
            assert outcome.error.finding.code == code

    @pytest.mark.parametrize("code", REPORTED)
    def test_a_report_names_the_line_of_the_program(self, code):
        for finding in catalogue_source.run(code, "bad").findings:
            stack = finding.access or finding.allocation
            assert {frame.file for frame in stack} == {str(catalogue_source.path(code, "bad"))}
            functions = {frame.function for frame in stack}
            assert "<module>" in functions
            # At level trap the access itself stands in a kernel.
            assert functions <= {"<module>", finding.kernel}

    @pytest.mark.parametrize("code", REPORTED)
    def test_its_repaired_twin_is_not_reported(self, code):
        outcome = catalogue_source.run(code, "fixed")
        assert outcome.findings == ()
        assert outcome.error is None

    @pytest.mark.parametrize("code", CATALOGUE)
    def test_programs_are_minimal_and_name_their_level(self, code):
        found = CATALOGUE[code]
        for kind in ("bad", "fixed"):
            text = catalogue_source.source(code, kind)
            assert len([line for line in text.splitlines() if line.strip()]) <= 30
            # Guards are on at level off, too, where no level is what a program is about.
            if "Level." in text and found.level not in (None, Level.OFF):
                assert f"level=Level.{found.level.name}" in text

    @pytest.mark.parametrize("code", CATALOGUE)
    def test_the_repair_turns_the_program_into_its_twin(self, code):
        repair = catalogue_source.repair(code).splitlines()
        bad, fixed = (catalogue_source.source(code, kind).splitlines() for kind in ("bad", "fixed"))
        taken = [line[1:] for line in repair if line.startswith("-")]
        given = [line[1:] for line in repair if line.startswith("+")]
        for line in taken:
            bad.remove(line)
        for line in given:
            fixed.remove(line)
        assert sorted(bad) == sorted(fixed)
        assert 1 <= len(taken) + len(given) <= 16

    def test_a_program_that_is_broken_is_not_taken_for_one_that_reports(self, monkeypatch):
        monkeypatch.setattr(catalogue_source, "source", lambda *_: "findings = None\nundefined")
        with pytest.raises(NameError):
            catalogue_source.run("MEM001", "bad")


class TestLookUp:
    @pytest.mark.parametrize(
        ("text", "near"),
        [
            ("MEM1", ["MEM001"]),
            ("mem02", ["MEM002"]),
            ("res", ["RES001", "RES002", "RES003"]),
            ("OWN01", ["OWN001"]),
            ("lib003", ["LIB001", "LIB002"]),
        ],
    )
    def test_near_ones_are_named(self, text, near):
        with pytest.raises(BadInputError) as caught:
            entry(text)
        named = str(caught.value).partition("near ones are ")[2].split(", ")
        assert set(near) <= set(named)
        assert len(named) <= 8

    @pytest.mark.parametrize("text", ["", "zzz", "7"])
    def test_all_are_named_where_none_is_near(self, text):
        with pytest.raises(BadInputError, match=r"known are RES001, RES002, .*NUM001$"):
            entry(text)


class TestPage:
    def test_the_file_is_what_the_catalogue_gives(self):
        """``python -m instrumentation.catalogue > docs/findings.md`` makes it anew."""
        assert (ROOT / "docs" / "findings.md").read_text(encoding="utf-8") == catalogue_page.page()

    def test_the_command_prints_it(self, capsys):
        catalogue.main()
        assert capsys.readouterr().out == catalogue_page.page()

    def test_every_code_has_a_row_and_a_section(self):
        page = catalogue_page.page()
        for code, found in CATALOGUE.items():
            [row] = [line for line in page.splitlines() if line.startswith(f"| [{code}](#{code.lower()})")]
            assert row.endswith({True: "| no |", False: "| yes |"}[code in NOT_REPORTED]) or "in part" in row
            section = page.partition(f"\n## {code}\n")[2].partition("\n## ")[0]
            assert found.meaning in section
            assert found.cure in section
            assert ("does not report it yet" in section) == (code in NOT_REPORTED)

    def test_readme_links_it(self):
        assert "(docs/findings.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
