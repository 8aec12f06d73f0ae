"""The same on a GPU: a race between two streams, and its repair, around a plain ``cuda.jit`` kernel."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import cuda

from instrumentation import Sanitizer
from instrumentation.devices.cuda_driver import has_driver


@cuda.jit
def axpy(a: Any, x: Any, y: Any) -> None:
    """Y += a x."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] += a * x[i]


def step(san: Sanitizer, *, repaired: bool) -> float:
    """Add on one stream, copy out on another; returns the last element."""
    x, y = (san.array(np.ones(1 << 20, np.float32), name=name) for name in "xy")
    compute, copies = san.stream("compute"), san.stream("copies")
    san.launch(san.kernel(axpy, block=256), 1 << 12, compute, a=np.float32(2.0), x=x, y=y)
    if repaired:
        done = san.event("done")
        compute.record(done)
        copies.wait(done)
    result = san.copy_out(y, copies)
    san.synchronize()
    return float(result[-1])


def main() -> None:
    """Run it wrongly, then repaired."""
    if not has_driver():
        print("skipped: no NVIDIA driver on this machine")
        return
    for repaired in (False, True):
        with Sanitizer(device="cuda", keep_going=True, file=sys.stdout) as san:
            print(f"repaired: {repaired}, y[-1] = {step(san, repaired=repaired)}\n")
        assert [finding.code for finding in san.findings] == ([] if repaired else ["STR011"])


if __name__ == "__main__":
    main()
