"""Forms in which findings are shown."""
