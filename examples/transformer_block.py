"""Run one Flax transformer block three ways, and compare their values, their time and their memory.

    uv run examples/transformer_block.py                          # flax.nnx, small enough for a CPU
    uv run examples/transformer_block.py --linen                  # flax.linen instead of flax.nnx
    uv run examples/transformer_block.py --lengths 1024,4096 --only softmax,flash

The block is causal self-attention and an MLP, each behind a norm. Its parameters are the same in the three ways, which differ
in what the attention module takes as `attention_fn`:

    jax        Flax's own attention, whose softmax is jax.nn.softmax; it writes the scores
    softmax    the same steps with jaxsoftmax.softmax; it writes the scores too
    flash      jaxsoftmax.flax.attention_fn, which holds the scores of a long sequence only in tiles

It prints by how much the output and the gradients differ from those of the same block in float64 on the CPU, which
implementations of jaxsoftmax run, and time and memory for each length. Plot and numbers go to --out.

Time is that of the wall clock, the median of several measurements after a warm-up. On a GPU several calls are queued and
waited for together, so that the time to start one hardly counts. Memory is the peak that the compiled program needs, of
arguments, results and temporary arrays (`memory_analysis()`): it is known even where a program then does not fit.
Of a GPU's memory JAX takes 75% by default; XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 gives it more.
"""

import argparse
import contextlib
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import jaxsoftmax
from examples.axes import label_logarithmic
from jaxsoftmax.flax import attention_fn

# The ways, and what the figure calls them.
WAYS = {"jax": "Flax's own attention", "softmax": "jaxsoftmax.softmax", "flash": "jaxsoftmax.flax.attention_fn"}
LOOKS: dict[str, dict[str, Any]] = {  # colours that colour-blind readers tell apart
    "jax": {"color": "#0072b2", "marker": "s"},
    "softmax": {"color": "#5c3310", "marker": "^", "linestyle": "--"},
    "flash": {"color": "#d55e00", "marker": "o", "linewidth": 2.8},
}
DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "forward+backward")
CHECKED_LENGTH = 1024  # at most: float64 on a CPU takes its time
MEASUREMENTS = 5
MIB = 2**20
# What is chosen where the command line does not say.
ON_GPU = {"lengths": [1024, 2048, 4096, 8192, 16384, 32768], "width": 2048, "head_size": 128, "dtype": "bfloat16"}
ELSEWHERE = {"lengths": [128, 256, 512], "width": 256, "head_size": 64, "dtype": "float32"}

Attention = Callable[..., jax.Array]
Program = Callable[..., Any]
# With it, products of 16-bit arrays that are summed up to float32 stay such products in the backward pass, where one of the
# arrays is float32. jax.nn.dot_product_attention does the same, on a CPU too, which does not have it for float16.
NARROW_PRODUCTS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
}


class InputError(Exception):
    """Something that the user gave cannot be used; the message is the one line to show."""


# What an attention module is given. It passes more than these need, such as dropout, which this block has none of.


def causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    wide_scores: bool = False,
    **_: Any,
) -> jax.Array:
    """Attention that writes the scores, through `jaxsoftmax.softmax`."""
    seen = causal(query.shape[-3]) if is_causal else mask
    precision, scores_dtype = None, query.dtype
    if wide_scores:
        scores_dtype = jnp.promote_types(query.dtype, "float32")
        precision = None if jax.default_backend() == "cpu" else NARROW_PRODUCTS.get(query.dtype.name)
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key, precision=precision, preferred_element_type=scores_dtype)
    weights = jaxsoftmax.softmax(scores, where=seen, scale=query.shape[-1] ** -0.5, dtype=value.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def exact_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """What the ways are compared with: in float64, unlike Flax's own attention in nnx, whose softmax stays in float32."""
    seen = causal(query.shape[-3]) if is_causal else mask
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, where=seen), value)


# Scores are as wide as those of Flax's own attention: float32 in nnx, of the block's dtype in linen.
NNX_ATTENTION: dict[str, Attention] = {
    "jax": nnx.dot_product_attention,
    "softmax": partial(softmax_attention, wide_scores=True),
    "flash": attention_fn,
    "exact": exact_attention,
}
LINEN_ATTENTION: dict[str, Attention] = {
    "jax": linen.dot_product_attention,
    "softmax": softmax_attention,
    "flash": attention_fn,
    "exact": exact_attention,
}


class NnxBlock(nnx.Module):
    """The block in nnx, which tells attention that it is causal."""

    def __init__(self, width: int, heads: int, dtype: str, attention: Attention, rngs: nnx.Rngs):
        types: Any = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(width, **types)
        # No bias: that of the key changes nothing, softmax being what it is, and its gradient would be nothing but noise.
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, attention_fn=attention, decode=False, keep_rngs=False, **types
        )
        self.hidden_norm = nnx.RMSNorm(width, **types)
        self.hidden = nnx.Linear(width, 4 * width, use_bias=False, **types)
        self.output = nnx.Linear(4 * width, width, use_bias=False, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.output(nnx.gelu(self.hidden(self.hidden_norm(x))))


class LinenBlock(linen.Module):
    """The block in linen, which gives attention a causal mask."""

    width: int
    heads: int
    dtype: str
    attention: Attention

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        types: Any = {"dtype": self.dtype, "param_dtype": self.dtype}
        dense: Any = {"use_bias": False, **types}
        mask = linen.make_causal_mask(jnp.ones((1, x.shape[1])), dtype=jnp.bool_)
        attention: Any = linen.MultiHeadAttention(self.heads, attention_fn=self.attention, name="attention", **dense)
        x = x + attention(linen.RMSNorm(name="attention_norm", **types)(x), mask=mask)
        hidden = linen.Dense(4 * self.width, name="hidden", **dense)(linen.RMSNorm(name="hidden_norm", **types)(x))
        return x + linen.Dense(self.width, name="output", **dense)(linen.gelu(hidden))


class Setting(NamedTuple):
    """Of what size and kind the block is."""

    width: int
    head_size: int
    batch: int
    dtype: str
    linen: bool
    seed: int

    @property
    def heads(self) -> int:
        return self.width // self.head_size


def block(setting: Setting, way: str, dtype: str | None = None) -> tuple[Callable[[jax.Array], Any], Program]:
    """The block as two functions: parameters of a key, and `apply(params, x)`. Parameters of one way fit all."""
    dtype = dtype or setting.dtype
    if setting.linen:
        module = LinenBlock(setting.width, setting.heads, dtype, LINEN_ATTENTION[way])
        return partial(module.init, x=jnp.zeros((1, 1, setting.width), dtype)), module.apply

    def make(key: jax.Array) -> NnxBlock:
        return NnxBlock(setting.width, setting.heads, dtype, NNX_ATTENTION[way], nnx.Rngs(key))

    graph = nnx.graphdef(nnx.eval_shape(make, jax.random.key(0)))
    return lambda key: nnx.state(make(key)), lambda params, x: nnx.merge(graph, params)(x)


def programs(setting: Setting, way: str, dtype: str | None = None) -> dict[str, Program]:
    """The passes, each a function of parameters, input and the output's gradient; forward takes no notice of the last."""
    _, apply = block(setting, way, dtype)

    def forward(params: Any, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return apply(params, x)

    def both(params: Any, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        out, pullback = jax.vjp(apply, params, x)
        return out, *pullback(cotangent)

    return dict(zip(PASSES, (forward, both), strict=True))


def parameters(setting: Setting) -> Any:
    init, _ = block(setting, "jax")
    return jax.jit(init)(jax.random.key(setting.seed))


def inputs(setting: Setting, length: int) -> tuple[jax.Array, jax.Array]:
    """Input of the block, and the gradient of its output."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(setting.seed), length))
    x, cotangent = (jax.random.normal(key, (setting.batch, length, setting.width), setting.dtype) for key in keys)
    return x, cotangent


def named(results: tuple[jax.Array, Any, jax.Array]) -> dict[str, np.ndarray]:
    """Output and gradients by name, in float64."""
    out, gradients, to_input = results
    table = {"output": out, "gradient of the input": to_input}
    for path, leaf in jax.tree.leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        # linen puts all parameters below "params", and nnx each array below its variable's "value".
        table["gradient of " + name.removeprefix("params.").removesuffix(".value")] = leaf
    return {name: np.asarray(array).astype(np.float64) for name, array in table.items()}


def exact(setting: Setting, params: Any, x: jax.Array, cotangent: jax.Array) -> dict[str, np.ndarray]:
    """Output and gradients of the same parameters and inputs, computed in float64 on the CPU."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise InputError("float64 needs the CPU: add it behind a comma to JAX_PLATFORMS") from error
    with jax.enable_x64(True), jax.default_device(cpu):
        widened = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(np.float64)), (params, x, cotangent))
        return named(jax.jit(programs(setting, "exact", "float64")["forward+backward"])(*widened))


def compiled(program: Program, *operands: Any) -> Any:
    return jax.jit(program).lower(*operands).compile()


def out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def differences(setting: Setting, ways: list[str], length: int) -> dict[str, dict[str, float]]:
    """By way and by name, the largest difference from float64 as a part of the largest value; a way out of memory has none."""
    operands = parameters(setting), *inputs(setting, length)
    expected = exact(setting, *operands)
    found: dict[str, dict[str, float]] = {}
    for way in ways:
        try:
            actual = named(compiled(programs(setting, way)["forward+backward"], *operands)(*operands))
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            found[way] = {}
            continue
        found[way] = {name: float(np.abs(actual[name] - e).max() / np.abs(e).max()) for name, e in expected.items()}
    return found


class Cost(NamedTuple):
    """Of one program. It is out of memory where there are no milliseconds; there may be mebibytes, if it could be compiled."""

    length: int
    way: str
    stage: str
    milliseconds: float | None
    mebibytes: float | None


def seconds(run: Callable[[], Any]) -> float:
    """The median time of a call."""

    def measure(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        return (time.perf_counter() - began) / calls

    jax.block_until_ready(run())
    # On a CPU, calls that are queued may run side by side.
    calls = 1 if jax.default_backend() == "cpu" else max(2, min(20, math.ceil(0.05 / measure(2))))
    return statistics.median(measure(calls) for _ in range(MEASUREMENTS))


def cost(setting: Setting, params: Any, length: int, way: str, stage: str) -> Cost:
    milliseconds = mebibytes = None
    try:
        operands = params, *inputs(setting, length)
        program = compiled(programs(setting, way)[stage], *operands)
        mebibytes = program.memory_analysis().peak_memory_in_bytes / MIB
        milliseconds = 1e3 * seconds(lambda: program(*operands))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
    return Cost(length, way, stage, milliseconds, mebibytes)


def columns(cells: list[str], widths: list[int]) -> str:
    return "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]).rstrip()


def print_differences(found: dict[str, dict[str, float]], setting: Setting, length: int) -> None:
    epsilon = float(jnp.finfo(setting.dtype).eps)
    print(f"\nLargest difference from float64 at length {length}, as a part of the largest value")
    names = list(dict.fromkeys(name for way in found.values() for name in way))
    widths = [max(map(len, [*names, "epsilon of bfloat16"])), *[13] * len(found)]
    print(columns(["", *found], widths))
    for name in names or ["output"]:
        print(columns([name, *[f"{way[name]:.2e}" if way else "out of memory" for way in found.values()]], widths))
    print(columns([f"epsilon of {setting.dtype}", *[f"{epsilon:.2e}"] * len(found)], widths))


def print_implementations(setting: Setting, ways: list[str], length: int) -> None:
    """What `jaxsoftmax.explain` says of the forward and the backward pass."""
    x = jax.ShapeDtypeStruct((setting.batch, length, setting.width), setting.dtype)
    params = jax.eval_shape(block(setting, "jax")[0], jax.random.key(0))
    for way in ways:
        if way != "jax":
            explanation = jaxsoftmax.explain(programs(setting, way)["forward+backward"], params, x, x)
            print(f"\n{way}, forward+backward at length {length}, {explanation}")


def measured(setting: Setting, ways: list[str], lengths: list[int]) -> list[Cost]:
    """Costs of all, printed as they come."""
    params, costs = parameters(setting), []
    widths = [6, 7, 13, 10, 16, 10]
    print("\nTime in milliseconds, and the peak of memory in MiB that the compiled program needs")
    print(columns(["length", "way", *[cell for stage in PASSES for cell in (stage, "memory")]], widths))
    for length in lengths:
        for way in ways:
            cells = []
            for stage in PASSES:
                costs.append(cost(setting, params, length, way, stage))
                _, _, _, milliseconds, mebibytes = costs[-1]
                cells.append("out of memory" if milliseconds is None else f"{milliseconds:.3f}")
                cells.append("-" if mebibytes is None else f"{mebibytes:.1f}")
            print(columns([str(length), way, *cells], widths), flush=True)
    return costs


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_csv(path: Path, header: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> None:
    """A None becomes an empty field."""
    with replaced(path) as temporary, temporary.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def draw(axes: Axes, costs: list[Cost], quantity: str) -> None:
    """One line for each way; a cross where a program is out of memory."""
    lengths = sorted({c.length for c in costs})
    for way in WAYS:
        of_way = [c for c in costs if c.way == way]
        if not of_way:
            continue
        values = [math.nan if (value := getattr(c, quantity)) is None else value for c in of_way]
        (line,) = axes.plot([c.length for c in of_way], values, **LOOKS[way], label=WAYS[way])
        unfit = [c for c in of_way if c.milliseconds is None and getattr(c, quantity) is not None]
        if unfit:
            points = [c.length for c in unfit], [getattr(c, quantity) for c in unfit]
            axes.plot(*points, "x", color=line.get_color(), markersize=12)
    if any(getattr(c, quantity) for c in costs):  # matplotlib has no logarithmic axis of nothing
        axes.set_yscale("log")
    label_logarithmic(axes, lengths)
    axes.grid(alpha=0.3)


def plot(path: Path, costs: list[Cost], title: str) -> None:
    """Time and memory against the length, as PNG."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")  # no pyplot: needs no display, and leaves no state behind
    figure.suptitle(title)
    labels = {"milliseconds": "time (ms)", "mebibytes": "memory (MiB)"}
    for row, (quantity, label) in enumerate(labels.items()):
        for column, stage in enumerate(PASSES):
            axes = figure.add_subplot(2, 2, 2 * row + column + 1)
            axes.set(xlabel="length", ylabel=label, title=stage)
            draw(axes, [c for c in costs if c.stage == stage], quantity)
    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines() if line.get_marker() != "x"}
    if any(c.milliseconds is None for c in costs):
        lines["out of memory"] = Line2D([], [], color="gray", linestyle="", marker="x", markersize=12)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False)
    with replaced(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 4294967295")
    return int(text)


def some_lengths(text: str) -> list[int]:
    """Positive integers, in rising order and each once."""
    try:
        return sorted({whole(part) for part in text.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive integers with commas between them") from None


def some_ways(text: str) -> list[str]:
    """Some of the ways, in their own order."""
    parts = text.split(",")
    for part in parts:
        if part not in WAYS:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(WAYS)}")
    return [way for way in WAYS if way in parts]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    description = "Run one Flax transformer block three ways, and compare their values, their time and their memory."
    codes = "Exit codes: 0 done, 1 cannot go on, 2 bad input (nothing was written), 130 interrupted."
    parser = Parser(description=description, epilog=codes)

    def add(name: str, kind: Any, text: str, **options: Any) -> None:
        """An option whose default depends on the platform."""
        values = (defaults[name] for defaults in (ON_GPU, ELSEWHERE))
        on_gpu, elsewhere = (",".join(map(str, v)) if isinstance(v, list) else v for v in values)
        text = f"{text} (default: {on_gpu} on a GPU, {elsewhere} elsewhere)"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text, **options)

    parser.add_argument("--linen", action="store_true", help="a block of flax.linen, not of flax.nnx")
    add("lengths", some_lengths, "tokens in a sequence, several with commas between them", metavar="N,...")
    add("width", whole, "features of each token", metavar="N")
    add("head_size", whole, "features of each token in an attention head; must divide the width", metavar="N")
    parser.add_argument("--batch", type=whole, default=1, metavar="N", help="sequences at once (default: %(default)s)")
    add("dtype", None, "of parameters and of arithmetic", choices=DTYPES)
    parser.add_argument("--seed", type=seed, default=0, help="of parameters and inputs (default: %(default)s)")
    only_help = f"which ways to run, of {','.join(WAYS)} (default: all)"
    parser.add_argument("--only", type=some_ways, default=list(WAYS), metavar="WAY,...", help=only_help)
    out = Path("runs/transformer_block")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="where the results go (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, value in (ON_GPU if jax.default_backend() == "gpu" else ELSEWHERE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.width % args.head_size:
        raise InputError(f"argument --head-size: {args.head_size} is not a divisor of --width {args.width}")
    if args.dtype == "float16" and not args.linen and "jax" in args.only and jax.default_backend() == "cpu":
        raise InputError(
            "argument --dtype: float16 is not what Flax's own attention in nnx runs in on a CPU, allowed are float32, bfloat16;"
            " or use --linen, or --only softmax,flash"
        )
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"argument --out: {args.out} is not a directory")
    return args


def compare(args: argparse.Namespace) -> None:
    setting = Setting(args.width, args.head_size, args.batch, args.dtype, args.linen, args.seed)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte in it
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"argument --out: {args.out} cannot be used: {reason}") from error
    device = jax.devices()[0].device_kind
    kind = f"{setting.heads} heads of {setting.head_size}, batch {setting.batch}, {setting.dtype}"
    title = f"{'linen' if setting.linen else 'nnx'} block of width {setting.width}, {kind}, on {device}"
    print(f"{title}; jax {jax.__version__}, flax {flax.__version__}")
    shortest = args.lengths[0]
    checked = min(shortest, CHECKED_LENGTH)
    found = differences(setting, args.only, checked)
    print_differences(found, setting, checked)
    print_implementations(setting, args.only, shortest)
    costs = measured(setting, args.only, args.lengths)
    plot(args.out / "cost.png", costs, title)
    write_csv(args.out / "cost.csv", Cost._fields, costs)
    rows = [(name, way, value) for way, values in found.items() for name, value in values.items()]
    write_csv(args.out / "differences.csv", ("result", "way", "difference"), rows)
    print(f"\nwrote cost.png, cost.csv and differences.csv to {args.out}")


def main(argv: list[str] | None = None) -> int:
    try:
        compare(parse_arguments(argv))
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"{Path(__file__).name}: error: out of memory before there was anything to measure", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{Path(__file__).name}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
