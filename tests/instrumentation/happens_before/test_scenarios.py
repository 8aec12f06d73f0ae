"""Races are refused and their repaired twins run, on the host device and on the CUDA device."""

import pytest
from fake_cuda import fake_device
from race_scenarios import SCENARIOS
from racing import Player, parse


@pytest.fixture(params=["host", "cuda"])
def player(request):
    made = Player(fake_device() if request.param == "cuda" else None)
    yield made
    made.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_race_is_refused(player: Player, name: str):
    code, racy, _ = SCENARIOS[name]
    finding = player.play(racy)
    assert finding is not None
    assert finding.code == code
    assert finding.previous
    assert finding.access
    last = parse(racy)[-1]
    assert finding.stream == (None if last.who == "host" else last.who)
    assert finding.size > 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_its_twin_runs(player: Player, name: str):
    _, _, repaired = SCENARIOS[name]
    assert player.play(repaired) is None


def test_there_are_enough():
    assert len(SCENARIOS) >= 60
