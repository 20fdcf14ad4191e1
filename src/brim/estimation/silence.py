"""Libraries' remarks on models that nobody runs stay off."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("transformers", "diffusers", "peft")


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and no log lines of the libraries that build models.

    They set their own level when they are first imported, which may be inside: so what they hand out is refused too.
    """
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
