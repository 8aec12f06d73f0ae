"""The fault sweep: fail every device call of a workload, one run for each, and judge what is left of the engine."""

from refengine.sweep.counting import SWEPT_KINDS
from refengine.sweep.judging import (
    MODES,
    OUTCOMES,
    Mode,
    Outcome,
    Reference,
    Run,
    SweepError,
    disturbed,
    plan_of,
    reference,
)
from refengine.sweep.runs import Journal, Key, Sweep, run_all
from refengine.sweep.script import Answer, Books, Workload

__all__ = [
    "MODES",
    "OUTCOMES",
    "SWEPT_KINDS",
    "Answer",
    "Books",
    "Journal",
    "Key",
    "Mode",
    "Outcome",
    "Reference",
    "Run",
    "Sweep",
    "SweepError",
    "Workload",
    "disturbed",
    "plan_of",
    "reference",
    "run_all",
]
