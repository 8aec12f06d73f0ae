"""How long a test waits for another process or thread: for ever, as far as a slow or busy machine can tell."""

from __future__ import annotations

#: seconds. Only what hangs takes them: a first start compiles kernels, which takes a minute where others work too.
PATIENCE = 900
