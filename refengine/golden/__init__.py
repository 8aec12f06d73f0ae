"""Recordings of what an engine computes, to hold it or another one against: ``refengine golden``."""
