"""What drafts are worth: the same greedy continuations with and without them, turn by turn in one process.

usage: python benchmarks/drafts.py [-m MODEL] [--device NAME] [-t THREADS] [-n TOKENS] [-r REPEATS] [--n-max N ...]
"""

from __future__ import annotations

import argparse
import platform
import statistics
from typing import TYPE_CHECKING

import refengine
from refengine.generation import DraftStatistics

if TYPE_CHECKING:
    from refengine import Engine

PROMPTS = (
    "def read_file(path):\n    with open(path",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "class TestParser(unittest.TestCase):\n    def test_",
)


def pace(engine: Engine, n_predict: int) -> tuple[float, list[list[int]], DraftStatistics]:
    """Tokens per second of all continuations together, the tokens, and how drafts fared."""
    made = [engine.generate(p, n_predict=n_predict, temperature=0, ignore_eos=True) for p in PROMPTS]
    tokens = sum(each.timings.predicted_tokens for each in made)
    seconds = sum(each.timings.predicted_seconds for each in made)
    drafts = sum((each.draft for each in made), DraftStatistics())
    return tokens / seconds, [each.tokens for each in made], drafts


def main() -> None:
    """Print a row for each ``n_max``; rates and ratios are medians over the turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="GGUF file with an MTP block; the default model")
    parser.add_argument("--device", default="host")
    parser.add_argument("-t", "--threads", type=int, help="threads of the host device; all cores")
    parser.add_argument("-n", "--n-predict", type=int, default=128, help="tokens of each continuation")
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("--n-max", type=int, nargs="+", default=[1, 2, 3], help="tokens of a draft")
    given = parser.parse_args()
    options = {"device": given.device, "threads": given.threads, "n_ctx": 512}
    print(
        "| n_max | plain t/s | drafts t/s | ratio | least, most | acceptance | tokens a decode | same tokens |"
    )
    print("|---" * 8 + "|")
    with refengine.load(given.model, **options) as plain:
        for n_max in given.n_max:
            with refengine.load(given.model, spec_type="draft-mtp", draft_n_max=n_max, **options) as drafting:
                for engine in (plain, drafting):
                    pace(engine, given.n_predict)  # compiles and captures
                turns = [
                    (pace(plain, given.n_predict), pace(drafting, given.n_predict))
                    for _ in range(given.repeats)
                ]
            ratios = [drafted[0] / alone[0] for alone, drafted in turns]
            rates = [statistics.median(turn[i][0] for turn in turns) for i in (0, 1)]
            drafts = turns[0][1][2]
            same = all(drafted[1] == alone[1] for alone, drafted in turns)
            print(
                f"| {n_max} | {rates[0]:.1f} | {rates[1]:.1f} | {statistics.median(ratios):.2f} | "
                f"{min(ratios):.2f}, {max(ratios):.2f} | {drafts.acceptance:.3f} | {drafts.mean_length:.2f} | {same} |"
            )
        print(f"device {plain.device.name}, {platform.machine()}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
