"""Our log lines in Ray processes: to stderr, which Ray writes to its files and forwards to the driver's terminal."""

from __future__ import annotations

import logging

LOGGERS = ("overlap_serve", "deployments")


def configure_logging(level: int = logging.INFO) -> None:
    """Show our loggers' lines. Idempotent; leaves the loggers of Ray and others alone."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.propagate = False
