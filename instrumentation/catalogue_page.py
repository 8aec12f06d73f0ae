"""The catalogue as a page of Markdown: docs/findings.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation import catalogue, catalogue_source

if TYPE_CHECKING:
    from instrumentation.catalogue_entry import Entry

_HEAD = """\
# Finding codes

<!-- Made by `python -m instrumentation.catalogue > docs/findings.md`. Change the catalogue, not this page. -->

Every report begins with a code. `refengine explain CODE` prints what is said here, and `refengine explain CODE --run`
runs the program and prints the report that it gives. A code never changes its meaning; a higher level finds what the
lower ones find, too.

The programs run as they are, without a GPU: `python -m instrumentation.catalogue_programs.mem001_bad`. Their repaired
twins (`mem001_fixed`) give no finding.
"""


def page() -> str:
    """The whole page, with a line break at its end."""
    entries = catalogue.CATALOGUE.values()
    return "\n".join(
        [_HEAD, *_table(list(entries)), "", "\n\n".join(_section(entry) for entry in entries), ""]
    )


def _table(entries: list[Entry]) -> list[str]:
    rows = ["| code | meaning | found at | in this version |", "|---|---|---|---|"]
    for entry in entries:
        known = {True: "no", False: "in part" if catalogue.status(entry.code) else "yes"}
        reported = known[entry.code in catalogue.NOT_REPORTED]
        rows.append(
            f"| [{entry.code}](#{entry.code.lower()}) | {entry.title} | {entry.found_by} | {reported} |"
        )
    return rows


def _section(entry: Entry) -> str:
    parts = [f"## {entry.code}", f"**{entry.title}**, found at {entry.found_by}. {entry.meaning}"]
    parts.append(" ".join(text for text in (f"Cure: {entry.cure}", catalogue.status(entry.code)) if text))
    parts.append(_block("python", catalogue_source.source(entry.code, "bad")))
    parts += ["Repaired:", _block("diff", catalogue_source.repair(entry.code))]
    return "\n\n".join(parts)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"
