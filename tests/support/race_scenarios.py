"""Races beside their repaired twins, in the language of ``racing.py``.

Each name has the code of the finding that refuses the last step of the first program; the second runs through.
"""

WW, RW, FREE, HOST = "STR010", "STR011", "STR012", "STR013"

SCENARIOS = {
    # --- two streams
    "write, write": (WW, "a fill x; b fill x", "a fill x; a record e; b wait e; b fill x"),
    "write, read": (RW, "a fill x; b read x", "a fill x; a record e; b wait e; b read x"),
    "read, write": (RW, "a read x; b fill x", "a read x; a record e; b wait e; b fill x"),
    "kernels that write": (
        WW,
        "a scale x > y; b scale z > y",
        "a scale x > y; a record e; b wait e; b scale z > y",
    ),
    "kernel that reads what another writes": (
        RW,
        "a scale x > y; b scale y > z",
        "a scale x > y; a record e; b wait e; b scale y > z",
    ),
    "kernel that reads and writes": (WW, "a bump x; b bump x", "a bump x; a record e; b wait e; b bump x"),
    "fill before a kernel": (WW, "a fill x; b bump x", "a fill x; b bump y"),
    "copy within the device": (RW, "a copy x > y; b bump x", "a copy x > y; a record e; b wait e; b bump x"),
    "copy to what another reads": (RW, "a scale x > y; b copy z > x", "a scale x > y; a copy z > x"),
    "reads alone do not race": (RW, "a read x; b read x; c read x; c fill x", "a read x; b read x; c read x"),
    "same stream": (WW, "a fill x; a bump x; b fill x", "a fill x; a bump x; a fill x"),
    # --- chains of events
    "two events": (
        RW,
        "a fill x; a record e1; b wait e1; b record e2; c wait e1; b fill y; c read y",
        "a fill x; a record e1; b wait e1; b fill y; b record e2; c wait e2; c read y; c read x",
    ),
    "transitive": (
        RW,
        "a fill x; a record e1; b wait e1; c read x",
        "a fill x; a record e1; b wait e1; b record e2; c wait e2; c read x",
    ),
    "transitive over four streams": (
        WW,
        (
            "a fill x; a record e1; b wait e1; b record e2; c wait e2; c record e3; d wait e2; c fill x; "
            "d fill x"
        ),
        "a fill x; a record e1; b wait e1; b record e2; c wait e2; c record e3; d wait e3; d fill x",
    ),
    "chain broken in the middle": (
        RW,
        "a fill x; b record e2; a record e1; b wait e1; c wait e2; c read x",
        "a fill x; a record e1; b wait e1; b record e2; c wait e2; c read x",
    ),
    "there and back": (
        RW,
        "a fill x; a record e1; b wait e1; b read x; a fill x",
        "a fill x; a record e1; b wait e1; b read x; b record e2; a wait e2; a fill x",
    ),
    "wait on the wrong stream": (
        RW,
        "a fill x; a record e; c wait e; b read x",
        "a fill x; a record e; b wait e; b read x",
    ),
    "event of the wrong stream": (
        RW,
        "a fill x; c record e; b wait e; b read x",
        "a fill x; a record e; b wait e; b read x",
    ),
    "an empty stream carries order": (
        RW,
        "a fill x; c record e; b wait e; b read x",
        "a fill x; a record e1; c wait e1; c record e; b wait e; b read x",
    ),
    # --- the event's moment
    "stale event": (
        RW,
        "a record e; a fill x; b wait e; b read x",
        "a fill x; a record e; b wait e; b read x",
    ),
    "stale for the second write": (
        WW,
        "a fill x; a record e; a bump x; b wait e; b fill x",
        "a fill x; a record e; a bump x; a record e; b wait e; b fill x",
    ),
    "wait before the record": (
        RW,
        "a fill x; b wait e; a record e; b read x",
        "a fill x; a record e; b wait e; b read x",
    ),
    "event that was never recorded": (
        RW,
        "a fill x; b wait e; b read x",
        "a fill x; a record e; b wait e; b read x",
    ),
    "recorded anew elsewhere before the wait": (
        RW,
        "a fill x; a record e; c record e; b wait e; b read x",
        "a fill x; a record e; b wait e; c record e; b read x",
    ),
    "recorded anew after the wait": (
        RW,
        "a fill x; a record e; b wait e; a fill x; a record e; b read x",
        "a fill x; a record e; b wait e; a fill y; a record e; b read x",
    ),
    "a later record covers what came before": (
        RW,
        "a fill x; a record e; a fill y; b wait e; b read y",
        "a fill x; a record e; a fill y; a record e; b wait e; b read x; b read y",
    ),
    "event made anew": (
        RW,
        "a fill x; a record e; e destroy; b wait e; b read x",
        "a fill x; a record e; b wait e; e destroy; b read x",
    ),
    "event made anew and recorded too early": (
        RW,
        "a record e; e destroy; a record e; a fill x; b wait e; b read x",
        "a record e; e destroy; a fill x; a record e; b wait e; b read x",
    ),
    # --- many readers, many writers
    "one reader of two is waited for": (
        RW,
        "a read x; a record e1; b read x; b record e2; c wait e1; c fill x",
        "a read x; a record e1; b read x; b record e2; c wait e1; c wait e2; c fill x",
    ),
    "the last reader of three is not waited for": (
        RW,
        "a read x; a record e1; b read x; b record e2; c read x; d wait e1; d wait e2; d fill x",
        (
            "a read x; a record e1; b read x; b record e2; c read x; c record e3; d wait e1; d wait e2; "
            "d wait e3; d fill x"
        ),
    ),
    "a reader reads again": (
        RW,
        "a read x; a record e; a read x; b wait e; b fill x",
        "a read x; a read x; a record e; b wait e; b fill x",
    ),
    "reader after one of two writers": (
        RW,
        "a fill x[0:32]; b fill x[32:64]; a record e; c wait e; c read x",
        "a fill x[0:32]; b fill x[32:64]; a record e1; b record e2; c wait e1; c wait e2; c read x",
    ),
    "reader after the first of two ordered writers": (
        RW,
        "a fill x; a record e1; b wait e1; b bump x; c wait e1; c read x",
        "a fill x; a record e1; b wait e1; b bump x; b record e2; c wait e2; c read x",
    ),
    "a write hides no reader": (
        RW,
        "a read x[0:8]; b fill x[8:16]; b record e; c wait e; c fill x[0:16]",
        "a read x[0:8]; b fill x[8:16]; b record e; c wait e; c fill x[8:16]",
    ),
    # --- the host waits
    "one-shot synchronise": (
        RW,
        "a fill x; host syncs a; a fill x; b read x",
        "a fill x; a fill x; host syncs a; b read x",
    ),
    "host waits on an event": (
        RW,
        "a record e; a fill x; host waits e; b read x",
        "a fill x; a record e; host waits e; b read x",
    ),
    "host waits on an event, then more work": (
        WW,
        "a fill x; a record e; host waits e; a bump x; b fill x",
        "a fill x; a record e; host waits e; a bump y; b fill x",
    ),
    "host waits on an event that was never recorded": (
        RW,
        "a fill x; host waits e; b read x",
        "a fill x; a record e; host waits e; b read x",
    ),
    "host synchronises another stream": (
        RW,
        "a fill x; host syncs c; b read x",
        "a fill x; host syncs a; b read x",
    ),
    "host synchronises a stream that waited": (
        RW,
        "a fill x; a record e; host syncs c; b read x",
        "a fill x; a record e; c wait e; host syncs c; b read x",
    ),
    "what was queued before the host waited": (
        RW,
        "a fill x; b fill y; host syncs b; b read x",
        "a fill x; b fill y; host syncs a; b read x",
    ),
    "device synchronise": (
        RW,
        "a fill x; b fill y; host syncs b; c read x",
        "a fill x; b fill y; host syncs all; c read x; c fill y",
    ),
    "device synchronise, then more work": (
        WW,
        "host syncs all; a fill x; b fill x",
        "a fill x; host syncs all; b fill x",
    ),
    "destroying a stream waits for it": (
        RW,
        "a fill x; b destroy; b read x",
        "a fill x; a destroy; b read x",
    ),
    # --- ranges
    "one byte shared": (WW, "a fill x[0:33]; b fill x[32:64]", "a fill x[0:32]; b fill x[32:64]"),
    "one byte shared at the start": (
        RW,
        "a read x[31:64]; b fill x[0:32]",
        "a read x[32:64]; b fill x[0:32]",
    ),
    "a hole": (
        WW,
        "a fill x[0:16]; a fill x[32:48]; b fill x[16:33]",
        "a fill x[0:16]; a fill x[32:48]; b fill x[16:32]",
    ),
    "part of the whole": (WW, "a fill x; b fill x[60:61]", "a fill x[0:60]; b fill x[60:61]"),
    "whole over parts": (
        RW,
        "a fill x[4:8]; b read x[0:4]; b read x[8:64]; b read x",
        "a fill x[4:8]; b read x[0:4]; b read x[8:64]",
    ),
    "views of two types": (WW, "a bump x[16:32]; b fill x[31:40]", "a bump x[16:32]; b fill x[32:40]"),
    "a part waited for": (
        WW,
        "a fill x[0:32]; a record e; a fill x[32:64]; b wait e; b fill x",
        "a fill x[0:32]; a record e; a fill x[32:64]; b wait e; b fill x[0:32]",
    ),
    "two buffers": (WW, "a fill x; b fill y; b fill x", "a fill x; b fill y"),
    # --- copies and host arrays
    "copy in behind a kernel": (
        RW,
        "a scale x > y; b put h > x",
        "a scale x > y; a record e; b wait e; b put h > x",
    ),
    "copy in, then a kernel": (
        RW,
        "a put h > x; b scale x > y",
        "a put h > x; a record e; b wait e; b scale x > y",
    ),
    "copy out of what is written": (
        RW,
        "a bump x; b get x > h",
        "a bump x; a record e; b wait e; b get x > h",
    ),
    "next input over a live one": (
        RW,
        "a put h > x; a scale x > y; b put i > x",
        "a put h > x; a scale x > y; a record e; b wait e; b put i > x",
    ),
    "array read before its copy landed": (
        HOST,
        "a get x > h; host reads h",
        "a get x > h; host syncs a; host reads h",
    ),
    "array written under a copy out": (
        HOST,
        "a get x > h; host writes h",
        "a get x > h; host syncs a; host writes h",
    ),
    "array freed under a copy out": (
        HOST,
        "a get x > h; host frees h",
        "a get x > h; host syncs a; host frees h",
    ),
    "array read after another stream's wait": (
        HOST,
        "a get x > h; host syncs b; host reads h",
        "a get x > h; b fill y; host syncs all; host reads h",
    ),
    "array read after its event": (
        HOST,
        "a record e; a get x > h; host waits e; host reads h",
        "a get x > h; a record e; host waits e; host reads h",
    ),
    "part of an array": (
        HOST,
        "a get x[0:32] > h[0:32]; host reads h[31:64]",
        "a get x[0:32] > h[0:32]; host reads h[32:64]",
    ),
    "two copies to one array": (HOST, "a get x > h; b get y > h", "a get x > h; host syncs a; b get y > h"),
    "an event does not land a copy": (
        HOST,
        "a get x > h; a record e; b wait e; host syncs b; host reads h",
        "a get x > h; a record e; b wait e; host syncs a; host reads h",
    ),
    "copy in of what has not landed": (
        HOST,
        "a get x > h; b put h > y",
        "a get x > h; host syncs a; b put h > y",
    ),
    "copy in of it on the same stream": (
        HOST,
        "a get x > h; a put h > y",
        "a get x > h; host waits e; host syncs a; a put h > y",
    ),
    # --- graphs
    "a graph on two streams": (
        WW,
        "a capture g bump x; a replay g; b replay g",
        "a capture g bump x; a replay g; a record e; b wait e; b replay g",
    ),
    "a graph replayed in order": (
        WW,
        "a capture g bump x; a replay g; a replay g; b bump x",
        "a capture g bump x; a replay g; a replay g; a bump x",
    ),
    "graph, launch": (
        RW,
        "a capture g scale x > y, bump z; a replay g; b scale z > w",
        "a capture g scale x > y, bump z; a replay g; a record e; b wait e; b scale z > w",
    ),
    "launch, graph": (
        RW,
        "a capture g scale x > y, bump z; b read z; a replay g",
        "a capture g scale x > y, bump z; b read x; a replay g",
    ),
    "graph after what its input is copied from": (
        RW,
        "a capture g scale x > y; b put h > x; a replay g",
        "a capture g scale x > y; b put h > x; b record e; a wait e; a replay g",
    ),
    "two graphs": (
        RW,
        "a capture g1 bump x; a capture g2 scale x > y; a replay g1; b replay g2",
        "a capture g1 bump x; a capture g2 scale z > y; a replay g1; b replay g2",
    ),
    "an event before the last replay": (
        WW,
        "a capture g bump x; a replay g; a record e; a replay g; b wait e; b fill x",
        "a capture g bump x; a replay g; a replay g; a record e; b wait e; b fill x",
    ),
    "graphs that only read": (
        RW,
        "a capture g scale x > y; b capture g2 scale x > z; a replay g; b replay g2; b bump x",
        "a capture g scale x > y; b capture g2 scale x > z; a replay g; b replay g2; b bump z",
    ),
    "a part in a graph": (
        WW,
        "a capture g bump x[0:32]; a replay g; b fill x[31:64]",
        "a capture g bump x[0:32]; a replay g; b fill x[32:64]",
    ),
    "a capture runs nothing": (
        WW,
        "b fill x; a capture g bump x; a replay g",
        "b fill x; a capture g bump x; b replay g",
    ),
    # --- memory that goes away
    "free under a write": (FREE, "a fill x; host frees x", "a fill x; host syncs a; host frees x"),
    "free under a read": (FREE, "a read x; host frees x", "a read x; a record e; host waits e; host frees x"),
    "free under another stream's work": (
        FREE,
        "a read x; b read x; host syncs a; host frees x",
        "a read x; b read x; host syncs all; host frees x",
    ),
    "free after a wait that no host made": (
        FREE,
        "a read x; a record e; b wait e; host frees x",
        "a read x; a record e; b wait e; host syncs b; host frees x",
    ),
    "free under a copy in": (FREE, "a put h > x; host frees x", "a put h > x; host syncs a; host frees x"),
    "free under a copy out": (FREE, "a get x > h; host frees x", "a get x > h; host syncs a; host frees x"),
    "free behind a graph": (
        FREE,
        "a capture g bump x; a replay g; g destroy; b fill y; host frees x",
        "a capture g bump x; a replay g; host syncs a; g destroy; b fill y; host frees x",
    ),
    "memory for another stream": (
        FREE,
        "a fill x; host syncs a; a fill x; host frees x",
        "a fill x; host syncs a; host frees x; host new x; b fill x",
    ),
}
