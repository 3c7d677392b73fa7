"""A progress bar of one line on a terminal, and plain lines elsewhere."""

import shutil
import sys
import time
from typing import TextIO

_WIDTH = 28


class Progress:
    """Shows how many of `total` steps are done: on `stream` as a bar if it is a terminal, else as a line for each step."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self._total, self._done, self._start = total, 0, time.perf_counter()
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()

    def step(self, name: str, outcome: str) -> None:
        """Counts one step, which had this outcome."""
        self._done += 1
        seconds = time.perf_counter() - self._start
        if self._is_terminal:
            filled = _WIDTH * self._done // self._total
            line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {self._done}/{self._total} {seconds:.0f} s  {name}"
            self._show(line)
        else:
            print(f"{self._done}/{self._total} {seconds:.0f} s  {name}: {outcome}", file=self._stream, flush=True)

    def end(self) -> None:
        """Clears the bar."""
        if self._is_terminal:
            self._show("", "\r")

    def _show(self, line: str, end: str = "") -> None:
        width = min(100, shutil.get_terminal_size().columns) - 1  # a full line would break, and stay
        print(f"\r{line[:width]:{width}}", end=end, file=self._stream, flush=True)
