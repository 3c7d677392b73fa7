"""What the parts of the worklog share: the rungs, the shapes that are measured, and how they are written."""

import dataclasses
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention, results
from benchmarks.results import Origin

ROOT = Path(__file__).parents[2]

Shape = tuple[int, int]

LONG: Shape = (1024, 131072)  # 512 KB a row: those in flight do not fit the cache, and a second read is one of memory
MEDIUM: Shape = (4096, 32768)  # 128 KB a row, and as many bytes in all
SHORT: Shape = (131072, 1024)  # rows that the cache still holds when they are read again
LADDERS = (LONG, MEDIUM, SHORT)
HUGE: Shape = (8, 2**24)
COUNTED = (HUGE, MEDIUM, SHORT)
FROM_MEMORY = (HUGE, MEDIUM)  # where a second read is one of memory
VECTOR: Shape = (1, 2**24)
OF_A_WRITE_UP: Shape = (1024, 32768)
SMALL: Shape = (1024, 512)
HALVES = tuple(itertools.product((32, 64), (512, 1024, 2048, 4096, 8192)))
SIZES = tuple(2**n for n in range(10, 29, 2))
ROW = 1024  # of the figure, whose first rows the cache holds when they are read again, and whose longer ones it does not
LONG_ROW = 131072

PEERS = ("jax.nn", "torch")
OF_VECTORS = ("tree", "online_blocks", "on_chip")  # the rungs that spread one row over the whole GPU
OF_ONE_VECTOR = (*OF_VECTORS, "fused", "online_wide")
REFERENCE = "online_wide"  # with which the other rungs' times and bytes are compared
NUMBERS_COUNTED = frozenset("2457")  # of the rungs whose bytes are held to their predictions

K = 5
OF_TOP_K = ("naive", "fused", "online_wide", "on_chip")  # the rungs before a search of lax.top_k
TOP_K_BASE = "safe_then_top_k"
# The vectors of the paper's benchmark are 63 times a power of two long, and those of the rungs a multiple of 512.
TOP_K_SHAPES: tuple[Shape, ...] = tuple(itertools.product((4000, 10), (2048, 8192, 32768, 131072)))
ATTENTION = attention.Call(batch=4, length=4096, heads=16, head_size=128)
WAYS_OF_ATTENTION = ("attention_written", "attention_fused")

OPERATIONS = 5  # an element: compare, subtract, exponentiate, add, divide
PEAK = 67e12  # float32 operations a second, of the GPU's data sheet


@functools.cache
def ladder() -> Any:
    """The example, as a module."""
    return importlib.import_module("examples.worklog.softmax_worklog")


def takes(rung: Any, shape: Shape, dtype: str = "float32") -> bool:
    return rung.unsupported(*shape, jnp.dtype(dtype)) is None


def shown(name: str) -> str:
    """A rung's name on the page: the one that is the library's is called as the library is in every table and figure."""
    return "jaxsoftmax" if name == "on_chip" else name


def text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def size(shape: Sequence[int], dtype: str = "float32") -> int:
    return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


def flags(more: str) -> str:
    """XLA's flags of this process and some more."""
    return f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()


def child(
    name: str, environment: dict[str, str], wrapper: Sequence[str] = (), arguments: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What this package prints in a process of its own, a line of JSON a case."""
    command = [*wrapper, sys.executable, "-m", "examples.worklog", "--child", name, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def origin(gpu: str, commit: str) -> dict[str, Any]:
    """What the rows of a new run have in common."""
    return dataclasses.asdict(Origin(results.new_run(), results.now(), gpu, jax.__version__, commit))
