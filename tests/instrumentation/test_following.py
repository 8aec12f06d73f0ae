"""A context that follows another one is refused when it is smaller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.errors import BadInputError, FindingError
from instrumentation.findings import FindingLog
from instrumentation.following import Extents, require_room
from instrumentation.ownership import Owner

NAMES = ("positions", "cells", "rows")
SIZES = st.fixed_dictionaries({name: st.integers(0, 5) for name in NAMES})


@given(draft=SIZES, target=SIZES)
def test_what_is_refused_is_exactly_what_is_smaller(draft, target):
    log = FindingLog()
    short = [name for name in target if draft[name] < target[name]]
    pair = Extents(Owner("draft"), draft), Extents(Owner("target"), target)
    if not short:
        require_room(*pair, log)
        assert log.list() == ()
        return
    with pytest.raises(FindingError, match="OWN003"):
        require_room(*pair, log)
    [finding] = log
    sizes = ", ".join(f"{name} {draft[name]} of {target[name]}" for name in short)
    assert finding.message == f"draft follows target and is smaller: {sizes}"
    assert finding.actor == "draft"
    assert finding.access[0].function == test_what_is_refused_is_exactly_what_is_smaller.__name__


def test_a_size_that_the_follower_does_not_give_is_bad_input():
    log = FindingLog()
    target = Extents(Owner("target"), {"positions": 1, "cells": 1})
    with pytest.raises(
        BadInputError, match="draft does not say how many cells it has; give what target gives"
    ):
        require_room(Extents(Owner("draft"), {"positions": 1}), target, log)
    assert log.list() == ()
    require_room(Extents(Owner("draft"), {"positions": 1, "cells": 1, "own": 0}), target, log)


@pytest.mark.parametrize("sizes", [{}, {"positions": -1}])
def test_extents_are_counts(sizes):
    with pytest.raises(AssertionError):
        Extents(Owner("draft"), sizes)
