"""The ``refengine`` command: one file per command."""
