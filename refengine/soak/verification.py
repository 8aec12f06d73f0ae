"""An answer as something to compare bit by bit: its tokens, and a SHA-256 of each row of logits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refengine.engine import Engine
    from refengine.generation import Generation
    from refengine.options import EngineOptions
    from refengine.soak.workload import Planned

_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Output:
    """Tokens of an answer, and the digests of the logits that they were chosen from, one behind the other."""

    tokens: tuple[int, ...]
    digests: bytes

    def __post_init__(self) -> None:
        assert len(self.digests) == len(self.tokens) * _DIGEST, len(self.tokens)

    @classmethod
    def of(cls, made: Generation) -> Output:
        """Of a generation with its logits."""
        assert made.logits is not None, "asked without return_logits"
        rows = (hashlib.sha256(row.tobytes()).digest() for row in made.logits)
        return cls(tuple(made.tokens), b"".join(rows))

    def difference(self, wanted: Output) -> str | None:
        """Where this is not what was wanted, in words; None when every bit is the same."""
        if self == wanted:
            return None
        for i in range(min(len(self.tokens), len(wanted.tokens))):
            digest = slice(i * _DIGEST, (i + 1) * _DIGEST)
            if self.digests[digest] != wanted.digests[digest]:
                return f"the logits of token {i + 1} of {len(self.tokens)} differ"
            if self.tokens[i] != wanted.tokens[i]:
                return (
                    f"token {i + 1} of {len(self.tokens)} is {self.tokens[i]} and not {wanted.tokens[i]}, of the "
                    "same logits"
                )
        return f"it has {len(self.tokens)} tokens and not {len(wanted.tokens)}"


def alone_options(options: EngineOptions, n_ctx: int) -> dict[str, Any]:
    """Options of an engine that computes one request at a time, without drafts, for as long a sequence."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    alone = {"n_ctx": n_ctx, "n_slots": 1, "kv_unified": True, "spec_type": "none"}
    # The limit is of the soaked engine.
    return given | alone | {"device_memory_limit": None}


def compute_alone(engine: Engine, planned: Planned) -> Output:
    """Answer of an engine that does nothing else and knows no prefix. Raises what the request ends with."""
    engine.drop_prefixes()
    return Output.of(
        engine.generate(
            list(planned.prompt),
            n_predict=planned.n_predict,
            temperature=planned.temperature,
            seed=planned.seed,
            ignore_eos=True,
            return_logits=True,
        )
    )
