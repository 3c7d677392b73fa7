"""What JAX compiles while a test runs."""

import contextlib
import logging

import jax


@contextlib.contextmanager
def compilations():
    """Gives a list, to which the message of each program that JAX compiles is appended."""
    messages: list[str] = []

    def emit(record):
        if record.getMessage().startswith("Compiling"):
            messages.append(record.getMessage())

    handler = logging.Handler()
    handler.emit = emit
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        with jax.log_compiles():
            yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
