"""What an exported model is worth, measured through refengine.

    python examples/train_default/evaluate.py OUT/model.gguf

Bits a byte on held-out files beside a byte 5-gram, acceptance of drafts along greedy continuations of held-out
code, and what the model writes behind ten prompts. Prints a model card in Markdown, with what OUT/report.json says
of the training; ``--card FILE`` writes it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from corpus import Corpus, SourceFile
from ngram import ByteNgram

import refengine
from refengine.generation import DraftStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from refengine import Engine

PROMPTS = (
    "def fib(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "def read_file(path):\n    with open(path",
    "class TestParser(unittest.TestCase):\n    def test_",
    "for i in range(10):\n",
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "    def __repr__(self):\n",
    "try:\n    import json\nexcept ImportError:\n",
    "async def handle(reader, writer):\n",
)
_FENCE = "```"
_INTRODUCTION = (
    "A qwen35 (six gated delta nets and two layers that attend) with an MTP head, small enough to come with refengine. "
    "`refengine` takes it where `-m` is left out; `refengine inspect` lists its tensors."
)
_LICENCE = (
    "* Licence: the text is CPython's, copyright Python Software Foundation, under the Python Software Foundation "
    "License Version 2 (SPDX `PSF-2.0`; some of its files name further authors); the file made from it is given under "
    "the same."
)
_LIMITS = (
    "* Limits: it writes what looks like Python, and does not know what it is for: what it writes is not to be run. It "
    "was trained on one library and its tests, repeats itself under greedy sampling, has read nothing but code, "
    "comments and docstrings, and sees 1,024 tokens. It may give back passages of what it read word for word."
)


def bits_a_byte(engine: Engine, files: Sequence[SourceFile], n_ctx: int) -> tuple[float, int]:
    """Bits and bytes of all files: each in pieces that fit the context, every piece as if it stood alone."""
    bits, n_bytes = 0.0, 0
    for file in files:
        tokens = engine.tokenizer.encode(file.text)
        for start in range(0, len(tokens), n_ctx):
            piece = tokens[start : start + n_ctx]
            if len(piece) < 2:
                continue
            logits = engine.logits(piece[:-1]).astype(np.float64)
            top = logits.max(axis=-1)
            normaliser = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
            said = logits[np.arange(len(logits)), piece[1:]]
            bits += float((normaliser - said).sum()) / math.log(2)
            # The first token of a piece is given, and so are its bytes.
            n_bytes += sum(len(engine.tokenizer.token_bytes(token)) for token in piece[1:])
    return bits, n_bytes


def acceptance(
    engine: Engine, files: Sequence[SourceFile], n_prompts: int, n_predict: int
) -> DraftStatistics:
    """Drafts along greedy continuations of pieces of held-out files, evenly over all of them."""
    tokens = [token for file in files for token in engine.tokenizer.encode(file.text)]
    n_prompt, total = engine.settings.n_ctx // 8, DraftStatistics()
    for place in np.linspace(0, len(tokens) - n_prompt, n_prompts).astype(int):
        prompt = tokens[place : place + n_prompt]
        total += engine.generate(prompt, n_predict=n_predict, temperature=0, ignore_eos=True).draft
    return total


def completions(engine: Engine, n_predict: int) -> str:
    """Markdown: what the model writes behind each prompt, greedy and at temperature 0.8."""
    parts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.8):
            made = engine.generate(prompt, n_predict=n_predict, temperature=temperature, seed=1)
            parts.append(f"temperature {temperature:g}\n\n{_FENCE}python\n{prompt}{made.text}\n{_FENCE}\n")
    return "\n".join(parts)


def losses(engine: Engine, corpus: Corpus, max_bytes: int) -> str:
    """Markdown: the model's loss and the 5-gram's on the shorter held-out files."""
    files, n_bytes = [], 0
    for file in sorted(corpus.held_out, key=lambda file: len(file.text)):
        if n_bytes < max_bytes:
            files.append(file)
            n_bytes += len(file.text.encode())
    n_ctx = engine.settings.n_ctx
    bits, n_bytes = bits_a_byte(engine, files, n_ctx)
    ngram = ByteNgram.train([file.text.encode() for file in corpus.training])
    counted = float(np.concatenate([ngram.bits(file.text.encode()) for file in files]).mean())
    rows = [
        f"| {name} | {found:.4f} | {found * math.log(2):.4f} |"
        for name, found in (("this file", bits / n_bytes), ("byte 5-gram, interpolated Witten-Bell", counted))
    ]
    return "\n".join(
        [
            (
                f"{len(files)} held-out files, {n_bytes:,} bytes, in pieces of {n_ctx:,} tokens that each start from "
                "nothing; the 5-gram counted the same training text:\n"
            ),
            "| | bits a byte | nats a byte |",
            "|---|---|---|",
            *rows,
        ]
    )


def drafted(model: Path, n_prompts: int, n_predict: int, drafts: DraftStatistics) -> str:
    """Markdown: acceptance as counted here, and as the report beside the model has it."""
    lines = [
        (
            f"Up to 3 at a time, along {n_prompts} greedy continuations of {n_predict} tokens behind pieces of "
            f"held-out files: {drafts.accepted:,} of {drafts.generated:,} accepted ({drafts.acceptance:.3f}), "
            f"{drafts.mean_length:.2f} tokens a verification. Greedy text that repeats itself is easily drafted."
        )
    ]
    lines.append(
        "Speed is no reason to draft with this model: drafts made decoding slower on two CPU cores and on an H200 "
        "(`python benchmarks/drafts.py`; numbers in docs/measurements.md)."
    )
    path = model.with_name("report.json")
    counted = json.loads(path.read_text()).get("acceptance") if path.exists() else None
    if counted:
        share = counted["accepted"] / counted["generated"]
        lines.append(
            f"PyTorch counted {counted['accepted']:,} of {counted['generated']:,} ({share:.3f}) at the end of the "
            "training, along other pieces."
        )
    return "\n".join(lines) + "\n"


def training(model: Path, corpus: Corpus) -> str:
    """Markdown: what the report beside a model says of its training; empty without one."""
    path = model.with_name("report.json")
    if not path.exists():
        return ""
    report = json.loads(path.read_text())
    text, progress = report["corpus"], report["progress"]
    epochs = report["tokens_seen"] / report["training_tokens"]
    data = (
        f"* Data: Python source of CPython {text['python']}'s standard library, without copies, tables and other "
        f"people's packages; {report['training_tokens']:,} tokens of {report['held_out_bytes_per_token']:.2f} bytes, "
        f"{report['held_out_tokens']:,} more held out (one file in fifty, by its path). "
        f"SHA-256 of paths and texts: `{text['sha256']}`."
    )
    run = (
        f"* Training: `{report['command']}`; {progress['step']:,} steps of {report['settings']['batch']} windows "
        f"of {report['config']['n_ctx']:,} tokens, {report['tokens_seen']:,} tokens seen ({epochs:.1f} epochs), "
        f"{progress['elapsed'] / 60:.1f} minutes behind {progress['setup']:.0f} s "
        f"of reading and compiling, on {report['device']}, PyTorch {report['torch']}. Weights of step "
        f"{progress['best_step']:,}, the best by held-out loss: {progress['best_loss']:.4f} nats a token before they "
        f"were quantised."
    )
    size = f"* Size: {report['parameters']:,} parameters; {model.stat().st_size:,} bytes in Q8_0 with the vocabulary."
    lines = [data, size, run, _LICENCE, _LIMITS]
    if text["sha256"] != corpus.sha256:
        lines.append(
            "* **Measured below on another text than it was trained on: held-out files may be among that.**"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, then print or write the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--corpus", type=Path, help="packed corpus; else this Python's library is read")
    parser.add_argument("--card", type=Path, help="file to write; else it is printed")
    parser.add_argument(
        "--max-bytes", type=int, default=200_000, help="of held-out text to measure the loss on"
    )
    parser.add_argument("--prompts", type=int, default=40, help="continuations to count drafts along")
    parser.add_argument("-n", "--predict", type=int, default=96, help="tokens of each")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.corpus:
        corpus = Corpus.load(options.corpus)
    else:
        corpus = Corpus.collect(Path(sysconfig.get_paths()["stdlib"]), platform.python_version())
    with refengine.load(
        options.model, device=options.device, spec_type="draft-mtp", draft_n_max=3, check="guard"
    ) as engine:
        drafts = acceptance(engine, corpus.held_out, options.prompts, options.predict)
        parts = [
            "# The default model\n",
            f"{_INTRODUCTION}\n",
            training(options.model, corpus),
            "\n## Loss\n",
            losses(engine, corpus, options.max_bytes),
            "\n## Drafts\n",
            drafted(options.model, options.prompts, options.predict, drafts),
            f"## What it writes\n\nSeed 1, {options.predict} tokens, drafts on; each block begins with its prompt.\n",
            completions(engine, options.predict),
        ]
        n_findings = len(engine.findings)
    card = "\n".join(parts).rstrip() + "\n"
    if options.card:
        options.card.write_text(card, encoding="utf-8")
        print(f"{options.card}: {drafts}; {n_findings} findings")
    else:
        print(card)


if __name__ == "__main__":
    main()
