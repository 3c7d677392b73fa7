"""The cells of attention that are measured under sustained load, and cool.

Attention that runs for long draws as much power as the GPU may, and its clocks fall until it does: time is energy then. A call
alone on a cool GPU has higher clocks. One who trains sees the first, one who serves single calls the second, and short turns
measure something between.

`attention_sustained`: each contender runs back to back for turns of `TURN` seconds, by turns. `us` is that of the wall clock.
`millijoules` is the energy of the whole GPU for a call, `sm_mhz` the median clock.

`attention_cool`: single launches, interleaved by contender, with `PAUSE` seconds of rest before each. `us` is the median of the
time of a call's kernels, all of them: FlashAttention-3 has kernels of its own before and after that of the gradients.

Beside the cells that bars name are those with the option `held_out`: shapes that no kernel is tuned for.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks import attention
from benchmarks.attention import HEAD_SIZES, HIDDEN, TOKENS, WINDOW, Call
from benchmarks.cells import OURS, Cell
from benchmarks.harness import Effort

TURN = 2.0  # seconds: in turns of 20 ms clocks had not settled, 411 us at first, 470 us later (H100, 128, causal)
PAUSE = 0.1  # seconds: calls of 0.1 to 15 ms keep the mean power far below the limit
AHEAD = 8  # cells; each needs 8 s of compilation and less than 1 GB of memory
CONTENDERS = (OURS, "flash_attention_3", "cudnn")
LENGTHS, SHORT_LENGTHS = (4096, 16384), (512, 1024)
GROUP = 4  # query heads that share a key head
HELD_OUT_LENGTHS, HELD_OUT_HEADS, HELD_OUT_SIZES = (3000, 6016, 10240), (24, 40), (80, 96, 112, 192)


def effort(turn: float) -> Effort:
    """Returns the effort of `attention_sustained`: two turns after one that only warms the GPU up."""
    return Effort(rounds=2, calls=1, turn=turn, loaded=True, warm_ups=1, ahead=AHEAD)


def cool_effort(pause: float) -> Effort:
    """Returns the effort of `attention_cool`: 15 launches."""
    return Effort(rounds=15, calls=1, cache=0, pause=pause, ahead=AHEAD)


def cells() -> list[Cell]:
    """All cells of `attention_sustained`."""
    return [*map(_cell, _calls(LENGTHS)), *map(_held_out, _held_out_calls())]


def cool_cells() -> list[Cell]:
    """All cells of `attention_cool`: those of `attention_sustained`, and shorter ones of small heads."""
    short = [_call(length, 64, causal=causal) for causal in (False, True) for length in SHORT_LENGTHS]
    return [*map(_cell, short), *cells()]


def _cell(call: Call) -> Cell:
    cell = attention.cell_of(call)
    return replace(cell, contenders=tuple(contender for contender in cell.contenders if contender.name in CONTENDERS))


def _held_out(call: Call) -> Cell:
    cell = _cell(call)
    return replace(cell, options=" ".join(sorted([*cell.options.split(), "held_out=1"])))


def _call(length: int, head_size: int, **more: Any) -> Call:
    usual: dict[str, Any] = {"batch": TOKENS // length, "heads": HIDDEN // head_size}
    return Call(length=length, head_size=head_size, **(usual | more))


def _calls(lengths: tuple[int, ...]) -> Iterator[Call]:
    for backward in (False, True):
        for length in lengths:
            for head_size in HEAD_SIZES:
                yield from (_call(length, head_size, causal=causal, backward=backward) for causal in (False, True))
            yield _call(length, 128, causal=True, key_heads=HIDDEN // 128 // GROUP, backward=backward)


def _held_out_calls() -> Iterator[Call]:
    for backward in (False, True):
        for causal in (True,) if backward else (False, True):
            kind: dict[str, Any] = {"causal": causal, "backward": backward}
            yield from (_call(length, 128, **kind) for length in HELD_OUT_LENGTHS)
            yield from (_call(4096, 128, heads=heads, **kind) for heads in HELD_OUT_HEADS)
            yield from (_call(4096, head_size, **kind) for head_size in HELD_OUT_SIZES)
        yield _call(2048, 128, keys=10000, backward=backward)
        yield _call(TOKENS, 128, causal=True, window=WINDOW, backward=backward)
