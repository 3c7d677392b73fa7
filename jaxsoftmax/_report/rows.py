"""The rows of result files, which `python -m jaxsoftmax --bench` writes and `python -m benchmarks` writes and reads."""

import datetime
import re
import subprocess
import uuid
from dataclasses import astuple, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """The origin of a row of a result file.

    Attributes:
      run: name that the rows of one process share; only rows of one run are compared.
      date: when it was measured, UTC.
      gpu, jax, commit: the GPU's name, the version of JAX, the commit of jaxsoftmax.
    """

    run: str
    date: str
    gpu: str
    jax: str
    commit: str


@dataclass(frozen=True)
class Row(Origin):
    """One measurement.

    Attributes:
      op, pass_, dtype, shape, options: the measured call. `pass_`, in the file `pass`, is `forward`, `backward`,
        `forward+backward`, or `first_call`: to trace, compile and run a fresh jit, on the wall clock. Suites may have more.
      implementation: the implementation or the peer that ran; `ours` for an import, which runs none.
      us: microseconds: the median over rounds of the time of all kernels of a call; for programs, and on several devices, the
        time on the wall clock.
      bytes: bytes that must be read and written; 0 if they do not matter.
      flops: number of operations, if the arithmetic is the limit; 0 if it is not counted.
      copy_share: `bytes / us` as a share of that of the run's copy of the same dtype, or of its only copy; None without a copy.
      error: the largest fraction of the error budget used; None for yardsticks.
      temporaries: bytes beyond inputs and outputs, on one device; None if they are not measured, and in older files, which lack
        the column.
      kernel_us: on several devices, microseconds that kernels run, the mean over devices; None elsewhere.
      least_us: on a machine that others may use too, the microseconds of the fastest round; None elsewhere.
      millijoules: under load, the energy that the whole GPU takes for one call; None elsewhere.
      sm_mhz: under load, the median clock of the multiprocessors; None elsewhere.
    """

    op: str
    pass_: str
    dtype: str
    shape: str
    options: str
    implementation: str
    us: float
    bytes: int
    flops: int
    copy_share: float | None
    error: float | None
    temporaries: int | None = None
    kernel_us: float | None = None
    least_us: float | None = None
    millijoules: float | None = None
    sm_mhz: float | None = None

    @property
    def speed(self) -> float:
        """Bytes per microsecond."""
        return self.bytes / self.us

    @property
    def tflops(self) -> float:
        """Operations per second, in units of 10^12."""
        return self.flops / self.us / 1e6

    @property
    def fastest_us(self) -> float:
        """Microseconds of the fastest round: `least_us` if it was measured, else `us`."""
        return self.us if self.least_us is None else self.least_us

    @property
    def cell(self) -> tuple[str, ...]:
        return self.op, self.pass_, self.dtype, self.shape, self.options


def columns_of(kind: type[Origin]) -> tuple[str, ...]:
    """Returns the columns of a file of such rows."""
    return tuple(field.name.rstrip("_") for field in fields(kind))


COLUMNS = columns_of(Row)


def new_run() -> str:
    """Returns a name for a run that begins now."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"


def now() -> str:
    """Returns the date for a row that is measured now."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def machine(gpu: str) -> str:
    """Returns the name of a GPU as files and folders have it: 'NVIDIA H200' is `h200`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")


def formatted(row: Row) -> list[str]:
    """Returns the cells of a row as text, in the order of `COLUMNS`."""
    *names, us, bytes_, flops, copy_share, error, temporaries, kernel_us, least_us, millijoules, sm_mhz = astuple(row)
    optional = (copy_share, ".4f"), (error, ".4g"), (temporaries, ""), (kernel_us, ".3f"), (least_us, ".3f")
    optional += (millijoules, ".3f"), (sm_mhz, ".0f")
    return [*names, f"{us:.3f}", str(bytes_), str(flops), *("" if n is None else format(n, form) for n, form in optional)]


def commit(root: Path) -> str | None:
    """Returns the short hash of a checkout, with `-dirty` if the package differs from it; None outside of a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout.strip()

    if not (root / ".git").exists():
        return None  # an installed package, which may lie in a repository of something else
    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", "jaxsoftmax") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
