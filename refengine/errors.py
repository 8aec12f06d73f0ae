"""Errors of the engine: leaves of the tree in ``instrumentation.errors``."""

from __future__ import annotations

from typing import ClassVar

from instrumentation.errors import BadInputError, Error


class ModelFileError(BadInputError):
    """A model file is damaged or dangerous. Names the file, the field, the value seen and the value wanted."""


class UnsupportedModelError(BadInputError):
    """A sound file asks for something that is not built: architecture, quantisation, tokenizer. Names it."""


class RequestError(BadInputError):
    """A request cannot be served as it was asked: empty prompt, bad sampling value, token out of range."""


class ContextSizeError(Error):
    """A request needs more positions than the context has."""

    exit_code: ClassVar[int] = 3


class AbortedError(Error):
    """Work was given up because an interrupt waits; it is raised and caught inside the engine."""


class ComputeError(Error):
    """A decode failed; the request that asked for it ends, others go on."""

    exit_code: ClassVar[int] = 3
