"""What the result files of the worklog say."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Row
from examples.worklog.common import LADDERS, VECTOR, Shape, text
from examples.worklog.counters import Counted


@dataclass(frozen=True)
class Measured:
    """The newest run of each op in the three result files, which may have been of that op alone; empty where there is none."""

    times: list[Row]
    counted: list[Counted]
    serial: list[Row]

    @classmethod
    def read(cls, folder: Path) -> "Measured":
        def newest[R: (Row, Counted)](name: str, kind: type[R]) -> list[R]:
            path = folder / f"{name}.csv"
            rows = results.read(path, kind) if path.exists() else []
            last = {row.op: row.run for row in rows}
            if "softmax" in last:  # whose times are compared with the copy's
                last["copy"] = last["softmax"]
            return [row for row in rows if row.run == last[row.op]]

        return cls(newest("worklog", Row), newest("worklog_bytes", Counted), newest("worklog_cpu", Row))

    def time(self, name: str, shape: Sequence[int], dtype: str = "float32", op: str = "softmax") -> float | None:
        """Microseconds, or None."""
        key = op, dtype, text(shape), name
        return next((r.us for r in self.times if (r.op, r.dtype, r.shape, r.implementation) == key), None)

    def bytes(self, name: str, shape: Sequence[int], op: str = "softmax") -> Counted | None:
        key = op, text(shape), name
        return next((one for one in self.counted if (one.op, one.shape, one.implementation) == key), None)

    @property
    def copy_speed(self) -> float | None:
        """Bytes a microsecond of the copy."""
        return next((row.speed for row in self.times if row.op == "copy"), None)

    def share(self, rung: Any, shape: Shape) -> float | None:
        """Of a rung's own roofline: its predicted bytes over its time, as a share of the copy's speed."""
        us, copy_speed = self.time(rung.name, shape), self.copy_speed
        return rung.bytes(*shape, "float32") / us / copy_speed if us and copy_speed else None

    def first_timed(self, rung: Any) -> Shape | None:
        """The first shape of the ladders, or the vector, at which a rung was timed."""
        return next((shape for shape in (*LADDERS, VECTOR) if self.time(rung.name, shape) is not None), None)
