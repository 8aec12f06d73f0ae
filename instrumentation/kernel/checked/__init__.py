"""Checked forms of kernels: what level trap runs.

``access`` and ``report`` are of both devices; ``runtime``, ``block`` and ``races`` are the host's. ``lower_cuda`` makes
the forms for a GPU: ``emit_cuda``, ``loops`` and ``own`` write them, with what ``bounds`` and those beside it know.
"""
