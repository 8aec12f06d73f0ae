"""Catalogue entries for streams, captured graphs, libraries, device memory, kernels and numbers."""

from __future__ import annotations

from instrumentation.catalogue_entry import Entry
from instrumentation.levels import Level

EXECUTION = (
    Entry(
        "STR001",
        "bad stream or event",
        Level.GUARD,
        """A stream or event is not one that the registry made, was destroyed, belongs to another
        device, or its handle is no longer the one that the driver gave.""",
        """Make streams and events through the registry only, and destroy them after their last use. A
        changed handle means that host memory was overwritten: look at the findings before this one.""",
    ),
    Entry(
        "STR010",
        "unordered write and write",
        Level.AUDIT,
        """Two streams write the same bytes and nothing orders one behind the other.""",
        """`stream.record(event)`, then `other.wait(event)`, between the two.""",
    ),
    Entry(
        "STR011",
        "unordered read and write",
        Level.AUDIT,
        """One stream reads bytes that another writes, and nothing orders the two.""",
        """`stream.record(event)`, then `other.wait(event)`, between the two.""",
    ),
    Entry(
        "STR012",
        "free while in use",
        Level.AUDIT,
        """A buffer was freed while a launch or copy that names it may still run.""",
        """Synchronise the stream, or wait for an event recorded behind the last use, before the free.""",
    ),
    Entry(
        "STR013",
        "host buffer touched during a copy",
        Level.AUDIT,
        """A host array was changed, or read, while an asynchronous copy from or to it was in flight.""",
        """Synchronise, or wait for the copy's event, before the array is used again.""",
    ),
    Entry(
        "GRA001",
        "captured graph names a buffer that goes away",
        Level.AUDIT,
        """A buffer that a captured graph names was about to be freed (refused at every level), or a graph
        was about to be replayed whose memory was planned anew and belongs to something else now (MEM004 at level
        guard).""",
        """Destroy the graph first: it unpins its buffers. Replay it under the plan that it was captured for.""",
    ),
    Entry(
        "GRA002",
        "graph cache out of bounds",
        Level.AUDIT,
        """The cache of captured graphs grew beyond its bound (`device.bound_graphs`), a graph was captured
        again although an identical one is kept, or a graph was never destroyed: each one holds device memory. The call
        is reported and goes on.""",
        """Look the graph up by its shape before a capture; destroy the oldest one; destroy all before the allocator is
        closed.""",
    ),
    Entry(
        "GRA003",
        "allocation or synchronise during capture",
        Level.AUDIT,
        """Memory was reserved or freed while a stream was being captured, or that stream was synchronised, or
        copied from or to the host. The copy is an error as well; the others are reported and go on.""",
        """Reserve everything, and copy what the launches read, before the capture begins.""",
    ),
    Entry(
        "LIB001",
        "library handle on another stream",
        Level.AUDIT,
        """A library handle works on another stream than the one on which it is called: one of another context, one
        that was destroyed, or one that nobody here has made; or its value is not what the library gave. The stream is
        read back from the library before each call, which is refused.""",
        """One handle for each context, which no other code has; set its stream once.""",
    ),
    Entry(
        "LIB002",
        "library workspace not owned",
        Level.AUDIT,
        """A library handle works in a workspace that is no buffer of its context, was freed, is too small, is another
        handle's on a stream that nothing orders, or was reset: setting a handle's stream does that. The call is
        refused.""",
        """Reserve a workspace as a buffer for each handle, and set it again after each change of the stream, as
        `LibraryHandle.set_stream` does.""",
    ),
    Entry(
        "ACC001",
        "device memory beyond the ledger",
        Level.AUDIT,
        """After warm-up the device has more and more memory in use that the ledger does not account for:
        something allocates behind the allocator's back, again and again. The report has the time series, and
        what grew in the ledger meanwhile. Another process on the device that keeps taking memory looks the same;
        one that takes it once does not.""",
        """Reserve through the allocator. Growth with each capture points to library workspaces in
        graphs.""",
    ),
    Entry(
        "RAC001",
        "two threads of a block race",
        Level.TRAP,
        """Two threads of one block access the same element between two barriers, and one of them
        writes; or two blocks of one launch do, which nothing orders. Atomics do not race with each other.""",
        """`cuda.syncthreads()` between the two accesses; for threads of one warp `cuda.syncwarp()` is enough. Between
        blocks only atomics, or another launch.""",
    ),
    Entry(
        "SYN001",
        "barrier reached by part of a block",
        Level.TRAP,
        """Some threads of a block wait at a barrier or shuffle that the others never reach, or that others
        reach more often: a value that the source promises to be the same in all threads is not. Where the source does
        not promise it, the kernel is refused when it is decorated, and the error's `finding` is this one.""",
        """Move the barrier out of the branch, or branch on something that is the same for the whole
        block.""",
    ),
    Entry(
        "NUM001",
        "first NaN or Inf",
        None,
        """A kernel wrote the first number that is not finite; what else is not behind it is its consequence.""",
        """The report says whether what the kernel reads was finite. If it was, look at its line for a division by
        zero, or an overflow in a narrow type; if not, at where that array came from: a weight, a copy, memory that
        nothing wrote. Where an infinity is meant, say so on the line that stores it: `# infinity: intended`.""",
        switch="--check-numerics",
    ),
)
