"""Time generation on the host device: start, decode, prompt, resident memory. One process per row.

usage: python benchmarks/generate.py [-m MODEL] [-c N] [--check LEVEL ...] [-r REPEATS] [-t THREADS]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

CHILD = "--child"


def measure(model: str, n_ctx: int, check: str, repeats: int, threads: int | None) -> dict[str, float]:
    """One engine from import to close; rates are the best of ``repeats``."""
    started = time.perf_counter()
    import numpy as np  # noqa: PLC0415

    import refengine  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415

    engine = refengine.load(resolve_model(model), check=check, n_ctx=n_ctx, threads=threads)
    engine.generate("Hello", n_predict=1, temperature=0)
    first = time.perf_counter() - started
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, engine.config.n_vocab, 512).tolist() for _ in range(repeats + 1)]
    read = [engine.generate(p, n_predict=1, temperature=0).timings.prompt_per_second for p in prompts]
    write = [
        engine.generate("Once upon a time", n_predict=128, temperature=0, ignore_eos=True)
        .timings.predicted_per_second
        for _ in range(repeats)
    ]  # fmt: skip
    findings = len(engine.check_integrity())
    row = {
        "start to first token s": first,
        "prompt 512 t/s": max(read[1:]),
        "decode 128 t/s": max(write),
        "resident MB": peak_resident_mb(),
        "findings": findings,
    }
    engine.close()
    return row


def peak_resident_mb() -> float:
    """Largest resident set of this process so far."""
    if sys.platform == "win32":
        return float("nan")
    import resource  # noqa: PLC0415

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure each check level in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--check", nargs="+", default=["off", "guard"])
    parser.add_argument("-r", "--repeats", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, help="threads of the host device; all cores")
    parser.add_argument(CHILD, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.model, given.ctx_size, given.check[0], given.repeats, given.threads)))
        return
    print(f"{given.model}, -c {given.ctx_size}, {platform.machine()}, Python {platform.python_version()}")
    rows = []
    for check in given.check:
        command = [sys.executable, str(Path(__file__)), CHILD, "-m", given.model, "-c", str(given.ctx_size)]
        command += ["--check", check, "-r", str(given.repeats)]
        command += [] if given.threads is None else ["-t", str(given.threads)]
        rows.append((check, json.loads(subprocess.run(command, check=True, capture_output=True).stdout)))
    names = list(rows[0][1])
    print("| check | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for check, row in rows:
        print(f"| {check} | " + " | ".join(f"{row[name]:.4g}" for name in names) + " |")


if __name__ == "__main__":
    main()
