"""Leases, as the order of work has them: a borrower comes behind the lender, and the lender behind the borrower."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from instrumentation.devices.monitor import Access
from instrumentation.findings import Finding, capture_stack
from instrumentation.ownership import Owner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.findings import Stack
    from instrumentation.happens_before.accesses import Conflict
    from instrumentation.happens_before.clocks import Clock
    from instrumentation.happens_before.order import Order
    from instrumentation.ownership import Lease


def broken(
    accesses: Iterable[Access], owner: Owner, stream: str | None, clock: Clock, order: Order, device: str
) -> Finding | None:
    """The finding of the first access to a borrowed buffer that its lease's event does not order (OWN011, OWN012).

    ``clock``: what is done where ``owner`` makes the access, on ``stream`` or (None) on the host. A lease without an
    event is left to the order of accesses: the host may have waited for all that the lender did.
    """
    for access in accesses:
        buffer = access.view.buffer
        if buffer.owner is owner or buffer.read_only or buffer.owner == owner:
            continue
        # Any lease that holds will do; of those that do not, the last one is what the borrower meant.
        leases = buffer.leases_for(owner, access.mode)
        problems = [_problem(lease, clock, order) for lease in leases]
        if problems and all(problems):
            return _finding(access, owner, stream, leases[-1], problems[-1] or ("", ""), device)
    return None


def _problem(lease: Lease, clock: Clock, order: Order) -> tuple[str, str] | None:
    """Code, and what is wrong with a lease's event; None when the borrower is behind it."""
    event = lease.after
    if event is None:
        return None
    # One that stood for the lender's work when the lease was made may stand for more by now; what came between is for
    # the order of accesses to tell.
    known = [snapshot for snapshot in (lease.handed, order.snapshot(event)) if snapshot is not None]
    if not known:
        how = "was destroyed" if getattr(event, "destroyed", False) else "was never recorded"
        return "OWN011", f"event {_name(event)}, which {how}"
    if not any(order.covers(clock, snapshot) for snapshot in known):
        return "OWN012", f"event {_name(event)}"
    return None


def _finding(
    access: Access, owner: Owner, stream: str | None, lease: Lease, problem: tuple[str, str], device: str
) -> Finding:
    buffer = access.view.buffer
    code, event = problem
    where = f"on stream {stream}" if stream is not None else "on the host"
    through = f" through {access.argument}" if access.argument is not None else ""
    waiter = f"stream {stream}" if stream is not None else "the host"
    cures = {
        "OWN011": f"record it on a stream of {buffer.owner} after its last write",
        "OWN012": f"and {waiter} has not waited for that; wait for it before {access.what}",
    }
    return Finding(
        code=code,
        message=(
            f"{access.what} of {owner} {where} would {access.mode} {access.view.name}{through}, which {buffer.owner} "
            f"lent behind {event}{';' if code == 'OWN011' else ','} {cures[code]}"
        ),
        buffer=buffer.facts(),
        kernel=access.kernel,
        argument=access.argument,
        launch=access.launch,
        stream=stream,
        actor=owner.name,
        device=device,
        access=capture_stack(),
        previous=lease.made_at,
        allocation=buffer.allocation,
    )


def blamed(finding: Finding, conflict: Conflict) -> Finding:
    """A conflict's finding as one of a lease, where lender and borrower are its two sides (OWN011, OWN012)."""
    first, then = conflict.earlier.detail, conflict.later.detail
    if not (isinstance(first, Access) and isinstance(then, Access)) or finding.actor is None:
        return finding
    buffer = then.view.buffer
    before, behind = conflict.earlier.op.timeline.owner, finding.actor
    lender = buffer.owner.name
    if first.view.buffer is not buffer or before == behind or lender not in (before, behind):
        return finding
    lease = buffer.last_lease(Owner(behind if before == lender else before))
    if lease is None:
        return finding
    lent = f"{buffer.name} is lent by {lender} to {lease.to}"
    if before != lender:
        code, why = "OWN012", f"{lent}, and {lender} went on before {lease.to} was done"
    elif lease.after is None:
        code, why = "OWN011", f"{lent} behind no event"
    else:
        code, why = "OWN011", f"{lent} behind event {_name(lease.after)}, which was recorded too early"
    return replace(
        finding,
        code=code,
        kind="",
        message=f"{why}: {finding.message}",
        notes=(*finding.notes, *_made(lease.made_at)),
    )


def _made(stack: Stack) -> tuple[str, ...]:
    return tuple(f"lent at {frame.file}:{frame.line} in {frame.function}" for frame in stack[:1])


def _name(event: object) -> str:
    return str(getattr(event, "name", event))
