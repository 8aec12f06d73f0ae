"""Clients that keep every slot busy, and proof that nobody's answer suffers: ``Soak``."""

from refengine.soak.plan import End, SoakPlan
from refengine.soak.running import Soak
from refengine.soak.summary import Summary

__all__ = ["End", "Soak", "SoakPlan", "Summary"]
