from __future__ import annotations

import pytest

from instrumentation.errors import BadInputError
from instrumentation.faults import KINDS, FaultInjector, FaultPlan, InjectedFaultError, pass_site


def fired(plan, calls):
    injector = FaultInjector(plan)
    for i, kind in enumerate(calls):
        injector.refusal(kind, f"call {i}")
    return [site.number for site in injector.fired]


CALLS = ["reserve", "copy", "launch", "reserve", "event", "graph", "reserve", "launch"]


def test_without_a_plan_sites_are_counted_and_none_fails():
    injector = FaultInjector()
    for kind in CALLS:
        assert injector.refusal(kind, "x") is None
    assert injector.sites == len(CALLS)
    assert injector.counts["reserve"] == 3
    assert injector.fired == []


@pytest.mark.parametrize("number", range(1, len(CALLS) + 1))
def test_nth_fails_exactly_that_site(number):
    assert fired(FaultPlan.nth(number), CALLS) == [number]


def test_nth_of_one_kind_counts_that_kind_alone():
    injector = FaultInjector(FaultPlan.nth(2, "reserve"))
    failing = [i for i, kind in enumerate(CALLS) if injector.refusal(kind, str(i))]
    assert failing == [3]
    assert injector.sites == 3


def test_from_nth_fails_every_later_site():
    assert fired(FaultPlan.from_nth(6), CALLS) == [6, 7, 8]


def test_random_failures_repeat_with_their_seed_and_differ_with_another():
    plans = [FaultPlan.at_random(0.5, seed) for seed in (1, 1, 2)]
    runs = [fired(plan, CALLS * 20) for plan in plans]
    assert runs[0] == runs[1] != runs[2]
    assert 40 < len(runs[0]) < 120


def test_the_error_names_the_site():
    injector = FaultInjector(FaultPlan.nth(2))
    pass_site(injector, "copy", "tokens")
    with pytest.raises(InjectedFaultError, match=r"fault site 2 \(launch rms_norm\)"):
        pass_site(injector, "launch", "rms_norm")


def test_a_disabled_injector_neither_counts_nor_fails():
    injector = FaultInjector(FaultPlan.nth(1))
    injector.enabled = False
    assert injector.refusal("copy", "x") is None
    assert injector.sites == 0


@pytest.mark.parametrize("bad", [{"kinds": ("gemm",)}, {"kinds": ()}, {"first": -1}, {"probability": 1.5}])
def test_bad_plans_are_refused(bad):
    with pytest.raises(BadInputError):
        FaultPlan(**bad)


def test_kinds_are_the_contract():
    assert KINDS == ("reserve", "copy", "launch", "event", "graph", "library")
