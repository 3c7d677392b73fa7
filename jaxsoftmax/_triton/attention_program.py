"""Programs of score and mask functions, as constants of kernels of attention: `attention_functions.py` runs them on tiles.

What such a function reads besides scores and positions is one array of int32 words: operands one after the other, flat, each
element as a word. A float has the bits of float32.
"""

import hashlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProgramStep:
    """An operation, which makes one more value of those before.

    Attributes:
      name: name of the operation in `attention_functions.OPERATIONS`.
      operands: numbers of values. First come the inputs of the program, then the results of its steps.
      options: constants of the operation: numbers, names of dtypes and operands.
    """

    name: str
    operands: tuple[int, ...]
    options: tuple[Any, ...] = ()


@dataclass(frozen=True, repr=False)
class TileProgram:
    """A program of a score or mask function.

    Attributes:
      steps: operations in the order in which they run.
      results: numbers of the values that are results.
      n_tile_loads: number of steps that load a word for each score.
    """

    steps: tuple[ProgramStep, ...]
    results: tuple[int, ...]
    n_tile_loads: int = 0

    def __repr__(self) -> str:
        """Names the program by a hash: Triton has the text of constants in the name of each function of a kernel."""
        return f"TileProgram({hashlib.sha256(repr((self.steps, self.results)).encode()).hexdigest()[:32]})"
