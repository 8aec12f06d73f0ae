"""What a soak came to: numbers for people and scripts, and everything that was wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from refengine.generation import DraftStatistics
    from refengine.soak.memory import MemoryPoint

ProblemKind: TypeAlias = Literal["difference", "incomplete", "injection", "finding", "growth", "livelock"]


@dataclass(frozen=True)
class Problem:
    """One thing that may not happen in a soak."""

    kind: ProblemKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Counts:
    """Requests by how they ended."""

    asked: int = 0
    #: of those asked: fit alone, were not cancelled, and were not hit by an injected failure
    due: int = 0
    completed: int = 0
    #: cannot fit, and were told so
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    #: of the failed ones, those that an injected failure ended
    hit: int = 0

    @property
    def ended(self) -> int:
        """No matter how."""
        return self.completed + self.refused + self.cancelled + self.failed

    @property
    def completed_part(self) -> float | None:
        """Completed of those that were due, 0 to 1; None when none was."""
        return self.completed / self.due if self.due else None


@dataclass(frozen=True)
class Summary:
    """A soak that has ended, or has come as far as this."""

    end: str
    seed: int
    clients: int
    pool: int
    seconds: float
    #: clients stopped by themselves, what they asked for has ended, and all of it was compared
    finished: bool
    requests: Counts
    steps: int
    mean_busy_slots: float
    retries: int
    preemptions: int
    generated_tokens: int
    recomputed_tokens: int
    reused_tokens: int
    draft: DraftStatistics
    #: device calls that failed on purpose
    injected_failures: int
    #: decodes that failed, together or alone
    failed_decodes: int
    #: different requests that were completed, and how many of them were computed alone to compare
    distinct: int
    verified: int
    #: how far warm-up went, in words
    warm_up: str
    memory: dict[str, MemoryPoint | None]
    problems: tuple[Problem, ...] = field(default=())

    def __post_init__(self) -> None:
        assert 0 <= self.requests.ended <= self.requests.asked, self.requests
        assert 0 <= self.verified <= self.distinct <= self.requests.completed, self
        assert list(self.memory) == ["load", "warm-up", "end"], self.memory

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not self.problems

    @property
    def recomputed_part(self) -> float:
        """Recomputed tokens for each generated one."""
        return self.recomputed_tokens / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, of all requests together."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def count(self, kind: ProblemKind) -> int:
        """Problems of a kind."""
        return sum(problem.kind == kind for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field, and what follows from them."""
        requests = asdict(self.requests) | {
            "unfinished": self.requests.asked - self.requests.ended,
            "completed_part": self.requests.completed_part,
        }
        draft = asdict(self.draft) | {
            "acceptance": self.draft.acceptance,
            "mean_length": self.draft.mean_length,
        }
        derived = {
            "ok": self.ok,
            "recomputed_part": self.recomputed_part,
            "tokens_per_second": self.tokens_per_second,
        }
        return derived | asdict(self) | {"requests": requests, "draft": draft}
