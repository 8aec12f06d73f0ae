"""The pytest plugin: a ``golden`` fixture for tests of any engine, and ``--golden-update``.

pytest loads it in every run of an environment that has refengine, so it imports nothing until a test asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from refengine.golden.fixture import Golden


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    parser.getgroup("golden").addoption(
        "--golden-update",
        action="store_true",
        help="Record what tests hold against goldens, in place of what was recorded.",
    )
    parser.addini(
        "golden_dir", "Folder of goldens, seen from the folder of each test file.", default="golden"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Hold named arrays against a recording: ``golden.check("first-prompt", {"l_out-0": array})``."""
    from refengine.golden.fixture import Golden  # noqa: PLC0415 - most tests ask for none

    folder = request.path.parent / str(request.config.getini("golden_dir"))
    return Golden(folder, update=bool(request.config.getoption("--golden-update")))
