"""Catalogue entries for reservations, memory and ownership."""

from __future__ import annotations

from instrumentation.catalogue_entry import Entry
from instrumentation.levels import Level

MEMORY = (
    Entry(
        "RES001",
        "reservation result not checked",
        Level.OFF,
        """A reservation was dropped, or its value was taken, before anyone looked whether it had
        succeeded. Had it failed, the program would have run on with memory that does not exist.""",
        """Look at `.ok` before `.value`, or call `.unwrap()`, which raises when the reservation failed.""",
    ),
    Entry(
        "RES002",
        "reservation failed",
        Level.OFF,
        """There is not enough memory, or not enough in one piece. The code of the error that a failed
        reservation carries, not a finding: running out of memory is no bug when the result is checked.
        The allocator is exactly as it was before the attempt.""",
        """The error names the largest holders: ask for less (a smaller context or batch), free
        something, or make the arena larger; `allocator.arena_size(requests)` says how large.""",
    ),
    Entry(
        "RES003",
        "plan larger than what was reserved",
        Level.OFF,
        """A plan computed for this batch shape needs more memory than was reserved for the worst case
        (`arena.check_plan`). A model that answers short prompts would have died at a long one.""",
        """Reserve for the largest plan before anything runs. What needs more all the same may reserve again and check
        the result.""",
    ),
    Entry(
        "MEM001",
        "canary left of a buffer damaged",
        Level.GUARD,
        """Bytes directly before the buffer were overwritten: an index ran below zero, or a write to the
        neighbour on the left ran far past its end.""",
        """The report names the launch after which the damage was seen. Run that launch at level `trap`
        for the source line.""",
    ),
    Entry(
        "MEM002",
        "canary right of a buffer damaged",
        Level.GUARD,
        """Bytes directly behind the buffer were overwritten: an index ran past the end. Also found when
        the memory there belongs to the next tensor of the same arena.""",
        """The report names the launch after which the damage was seen. Run that launch at level `trap`
        for the source line. A missing `if i < n` is the usual cause.""",
    ),
    Entry(
        "MEM003",
        "memory written after free",
        Level.GUARD,
        """The poison of a freed buffer was overwritten: something kept its address and wrote through
        it.""",
        """Free only when the last launch that writes the buffer has ended; drop captured graphs and
        views that name it first.""",
    ),
    Entry(
        "MEM004",
        "use of a freed buffer",
        Level.GUARD,
        """A launch, a copy, a captured graph or a lease names a buffer that was freed, or one of a
        layout that is not active now, so that other tensors live at its address.""",
        """Make views from the buffer that is live now; activate an overlay before its buffers are used.""",
    ),
    Entry(
        "MEM005",
        "bad free",
        Level.OFF,
        """Something was freed that cannot be: a buffer twice, a view, memory of another allocator, or
        the allocator was used after it was closed. The call is refused; nothing was changed.""",
        """Give each buffer one owner that frees it once.""",
    ),
    Entry(
        "MEM006",
        "leak at close",
        Level.OFF,
        """A buffer, overlay or arena was still reserved when its arena was released or the allocator
        closed.""",
        """Free what the report names, in the owner's `close()`.""",
    ),
    Entry(
        "MEM010",
        "load out of bounds",
        Level.TRAP,
        """A kernel read an element that its array does not have: an index of one axis is negative, or not
        less than that axis's extent. The load gave zero and the kernel went on.""",
        """Compare the index with the array's extent before the access; the report gives both.""",
    ),
    Entry(
        "MEM011",
        "store out of bounds",
        Level.TRAP,
        """A kernel wrote an element that its array does not have, by a store or an atomic operation, which
        was suppressed: an index of one axis is negative, or not less than that axis's extent.""",
        """Guard the store with `if i < x.shape[0]`; the report gives the index and the extent.""",
    ),
    Entry(
        "MEM012",
        "read of never-written memory",
        Level.TRAP,
        """A kernel read bytes that nothing has written since they were reserved, or an element of a shared
        or local array that nothing has written since the block began. It went on with what was there.""",
        """Write the whole input first, or narrow the view to what was written. Where a kernel selects away
        what it read, say so on that line: `# unwritten: allowed`.""",
    ),
    Entry(
        "MEM013",
        "use after free inside a kernel",
        Level.TRAP,
        """A kernel accessed memory that was freed after its launch was queued: through a view, or through
        a captured graph that was queued before it was destroyed. A load gave zero, a store was suppressed.""",
        """Free only when the last launch that names the buffer has ended. Memory of an allocator that the
        device watches cannot be freed earlier: the free is refused as STR012.""",
    ),
    Entry(
        "OWN001",
        "buffer of another owner",
        Level.GUARD,
        """A context used, or lent, a buffer that belongs to another context.""",
        """Let the owner lend it: `buffer.lend(to=draft, mode="read", after=event)`; share weights with
        `share_read_only()`.""",
    ),
    Entry(
        "OWN002",
        "stream, event or library handle of another owner",
        Level.GUARD,
        """A context recorded, on its stream, an event that belongs to another context, whose waiters take
        it for the owner's work. What a context queues on another one's stream counts as work of that one, and is
        OWN001 where it names a buffer that is not that one's to use. Or a context called a library by another
        one's handle.""",
        """Give each context a stream, events and handles of its own; order the two by letting one wait for the other's
        event.""",
    ),
    Entry(
        "OWN003",
        "draft context smaller than its target",
        Level.GUARD,
        """A draft context has fewer positions, cells, sequences, rows of a batch or rows of rotary
        tables than the target whose tokens it follows: it runs out first, in the middle of a request, or
        reads past the end of its tables. Refused at every level, before anything is reserved.""",
        """Size the draft context by its target, not by what its own model was trained for: the target's
        n_ctx, n_slots and n_batch.""",
    ),
    Entry(
        "OWN010",
        "access outside a lease",
        Level.AUDIT,
        """A context wrote under a lease to read, accessed a buffer after its lease had ended, or ended a
        lease twice. Where it never had a lease that is OWN001; at level guard all accesses are.""",
        """Lend in the mode that is needed, for as long as it is needed: `with buffer.lend(...)`.""",
    ),
    Entry(
        "OWN011",
        "lease without a recorded event",
        Level.AUDIT,
        """The borrower used a buffer that was lent behind an event which was never recorded, or which was
        recorded before the owner's last access; or that was lent without an event, while work of the owner on it may
        still be under way.""",
        """Record the event on the owner's stream after its last write, then lend with `after=event`.""",
    ),
    Entry(
        "OWN012",
        "hand-over not ordered",
        Level.AUDIT,
        """The borrower's stream did not wait for the lease's event before an access, or the owner went on
        before the borrower was done.""",
        """`draft_stream.wait(written)` before the first launch of the borrower, and back again after
        the last.""",
    ),
)
