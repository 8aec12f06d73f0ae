"""Device memory against the ledger: leaks are found, warm-up and one-off steps of others are not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fake_memory import FakeMemory
from hypothesis import example, given
from hypothesis import strategies as st

from instrumentation.allocator import Allocator
from instrumentation.devices.base import MemoryInfo
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.memory_watch import GRANULE, MIB, TOLERANCE, MemoryWatch
from instrumentation.ownership import Owner
from instrumentation.reports.text import render

TARGET = Owner("target")


class SharedMemory(FakeMemory):
    """Device memory of which somebody else has ``hidden`` bytes."""

    hidden = 0

    def memory_info(self) -> MemoryInfo:
        if self.broken:
            raise DeviceError("lost")
        info = super().memory_info()
        return MemoryInfo(free=info.free - self.hidden, total=info.total)


class Scene:
    """A watch on such a device, and a clock that stands still."""

    def __init__(self, **settings):
        self.memory = SharedMemory(1 << 40)
        self.findings = FindingLog()
        self.allocator = Allocator(self.memory, level=Level.AUDIT, findings=self.findings)
        self.now = 0.0
        self.watch = MemoryWatch(self.allocator, clock=lambda: self.now, **settings)

    def run(self, hidden):
        """A sample a second, of which somebody else has so many bytes."""
        for nbytes in hidden:
            self.now += 1.0
            self.memory.hidden = nbytes
            self.watch.sample()

    @property
    def codes(self):
        return [finding.code for finding in self.findings]


@pytest.fixture
def scene():
    made = Scene()
    made.watch.begin()
    return made


def granules(rate, seconds):
    """A leak of ``rate`` bytes a minute as a driver shows it."""
    return [int(rate * at / 60) // GRANULE * GRANULE for at in range(seconds)]


class TestGrowth:
    @pytest.mark.parametrize("rate", [40 * MIB, 50 * MIB])
    def test_the_leak_of_the_incident_is_found_within_a_minute(self, scene, rate):
        scene.run(granules(rate, 60))
        assert scene.codes == ["ACC001"]
        [finding] = scene.findings
        assert finding.size > TOLERANCE
        assert "fake has " in finding.message
        assert " MiB a minute" in finding.message

    def test_nothing_is_said_before_warm_up_is_over(self):
        scene = Scene()
        scene.run(range(0, 1 << 30, 10 * MIB))
        assert scene.watch.samples == ()
        scene.watch.begin()
        scene.run([1 << 30] * 20)
        assert scene.codes == []

    def test_what_only_warms_up_is_no_growth(self, scene):
        scene.run([2 * MIB, 4 * MIB, 6 * MIB, *[8 * MIB] * 300])
        assert scene.codes == []

    @pytest.mark.parametrize("nbytes", [16 * MIB, 30 << 30])
    def test_another_process_that_takes_memory_once_is_no_growth(self, scene, nbytes):
        scene.run([0] * 10 + [nbytes] * 100)
        assert scene.codes == []

    def test_nor_is_one_that_starts_and_fills_up_in_a_few_seconds(self, scene):
        scene.run([0, 0, *(500 * MIB * at for at in range(1, 9)), *[4000 * MIB] * 100])
        assert scene.codes == []

    def test_nor_is_one_that_comes_and_goes(self, scene):
        scene.run([0, 1 << 30] * 100)
        scene.run([100 * MIB * (at % 7) for at in range(70)])
        assert scene.codes == []

    def test_a_leak_beside_it_is_found_all_the_same(self, scene):
        leak = granules(45 * MIB, 90)
        scene.run([nbytes + (1 << 30) * (20 <= at < 23) for at, nbytes in enumerate(leak)])
        assert scene.codes == ["ACC001"]

    def test_a_leak_that_begins_when_others_have_left_is_measured_from_there(self, scene):
        scene.memory.hidden = 1 << 30
        scene.watch.begin()
        scene.run(granules(45 * MIB, 90))
        [finding] = scene.findings
        assert finding.size < 40 * MIB

    def test_what_the_ledger_explains_is_no_growth(self, scene):
        for at in range(20):
            scene.allocator.reserve_arena(4 * MIB, owner=TARGET, name=f"kv.{at}").unwrap()
            scene.memory.account.hold(TARGET, "graph")
            scene.run([0])
        assert scene.codes == []

    def test_an_arena_that_is_released_does_not_hide_a_leak(self, scene):
        arena = scene.allocator.reserve_arena(64 * MIB, owner=TARGET, name="kv").unwrap()
        scene.watch.begin()
        arena.release()
        scene.run(granules(45 * MIB, 60))
        assert scene.codes == ["ACC001"]

    def test_one_site_is_one_finding_and_counts_on(self, scene):
        scene.run(granules(45 * MIB, 240))
        [finding] = scene.findings
        assert finding.count > 1

    @given(st.lists(st.integers(0, 64), min_size=4, max_size=60), st.integers(0, 63))
    @example([0, 1, 13, 25], 0)
    def test_a_finding_means_that_memory_rose_and_never_fell_below(self, heights, start):
        scene = Scene(spacing=0)
        scene.memory.hidden = start * MIB
        scene.watch.begin()
        for height in heights:
            scene.run([height * MIB])
            if scene.codes:
                seen = [sample.unexplained for sample in scene.watch.samples]
                assert seen[-1] - min(seen) > TOLERANCE
                assert len({nbytes for nbytes in seen if nbytes > min(seen)}) >= 3
                return
        # Whatever was not found: every suffix minimum, less its largest step, is within the tolerance.
        seen = [sample.unexplained for sample in scene.watch.samples]
        levels = [min(seen)]
        for floor in (min(seen[at:]) for at in range(len(seen))):
            if floor >= levels[-1] + GRANULE:  # less is no step
                levels.append(floor)
        rises = [after - before for before, after in pairwise(levels)]
        assert len(rises) < 3 or sum(rises) - max(rises) <= TOLERANCE + 2 * GRANULE


class TestReport:
    def test_it_has_the_series_and_who_grew(self, scene):
        scene.allocator.reserve_arena(3 * MIB, owner=TARGET, name="weights").unwrap()
        scene.watch.begin()
        arena = scene.allocator.reserve_arena(MIB, owner=TARGET, name="kv").unwrap()
        arena.reserve(4096, owner=TARGET, name="kv.k.0").unwrap()
        scene.run(granules(48 * MIB, 60))
        [finding] = scene.findings
        series = [note for note in finding.notes if " in use, " in note]
        assert 4 <= len(series) <= 12
        assert series[0].split() == ["0.0", "s", "3.0", "MiB", "in", "use,", "3.0", "MiB", "explained"]
        assert series[-1].endswith("MiB in use, 4.0 MiB explained")
        assert "grown in the ledger since warm-up: kv.k.0 of target, by 4096 bytes" in finding.notes
        assert series[-1] in render(finding)

    def test_it_says_when_nobody_grew(self, scene):
        scene.run(granules(48 * MIB, 60))
        [finding] = scene.findings
        assert finding.notes[-1] == "no holder in the ledger has grown since warm-up"

    def test_samples_stay_bounded(self, scene):
        scene.run([0] * 3000)
        times = [sample.seconds for sample in scene.watch.samples]
        assert len(times) <= 256
        assert times == sorted(times)
        assert times[-1] == 3000.0


class TestWhen:
    def test_it_begins_by_itself_and_samples_seldom(self):
        scene = Scene(every=1.0, every_waits=4, warm_waits=10)
        for _ in range(9):
            scene.watch.tick()
        assert not scene.watch.watching
        for _ in range(3):
            scene.watch.tick()
        assert scene.watch.watching
        for _ in range(100):
            scene.watch.tick()
        assert len(scene.watch.samples) == 1
        scene.now += 1.0
        for _ in range(3):
            scene.watch.tick()
        assert len(scene.watch.samples) == 1
        scene.watch.tick()
        assert len(scene.watch.samples) == 2

    def test_it_waits_for_the_caller_where_it_is_told_to(self):
        scene = Scene(every_waits=1, warm_waits=None)
        for _ in range(10_000):
            scene.watch.tick()
        assert not scene.watch.watching
        assert scene.watch.sample() is None

    def test_a_device_that_is_lost_is_not_its_business(self, scene):
        scene.memory.broken = True
        assert scene.watch.sample() is None

    @pytest.mark.parametrize(
        "settings", [{"every": -1.0}, {"every_waits": 0}, {"spacing": -0.1}, {"tolerance": -1}]
    )
    def test_settings_that_make_no_sense_are_refused(self, settings):
        with pytest.raises(BadInputError, match="give numbers that are not negative"):
            Scene(**settings)
