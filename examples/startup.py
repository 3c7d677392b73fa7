"""The start of an example script, which says something before it imports what takes half a minute on a slow disk."""

import os
import signal
import sys
from pathlib import Path


def leave_at_once(*_: object) -> None:
    """Ends the program on Ctrl-C while it imports, when there is nothing to save: whatever is imported cannot object."""
    print(f"\n{Path(sys.argv[0]).name}: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


def importing(what: str) -> None:
    """Says what is imported next, and makes Ctrl-C end the program until `imported` is called."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave_at_once)
    print(f"importing {what} ...", flush=True)


def imported() -> None:
    """Gives Ctrl-C back to Python."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
