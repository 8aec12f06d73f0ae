"""Which of two accesses to the same bytes came first, by what streams, events and the host waited for.

``clocks`` and ``order`` know streams and events, ``intervals`` and ``footprint`` byte ranges, ``detector`` puts them
together, and none of them knows a device; ``audit`` is what a device calls, ``report`` words what it finds.
"""
