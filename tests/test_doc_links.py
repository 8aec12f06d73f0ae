"""Links of the documents lead somewhere: to a file of the tree, to a heading of a page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "refengine/**/*.md")
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def headings(page: Path) -> set[str]:
    """Anchors of a page, as its readers make them: lower case, hyphens for spaces, no other signs."""
    titles = re.findall(r"^#{1,6} (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    for target in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{target}: no such file"
        assert found.is_relative_to(ROOT), f"{target}: outside the project"
        assert not anchor or anchor in headings(found), f"{target}: no such heading"


def test_every_page_is_in_the_table_of_contents():
    docs = ROOT / "docs"
    listed = set(re.findall(r"^([\w/-]+)$", (docs / "index.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {str(path.relative_to(docs).with_suffix("")) for path in docs.glob("**/*.md")} - {
        "index"
    }
