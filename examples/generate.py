"""Generate tokens with a Flax model and its cache of keys and values, and measure tokens/s against the length of the cache.

    uv run examples/generate.py                                   # small enough for a CPU
    uv run --extra cuda13 examples/generate.py                    # on a GPU
    uv run examples/generate.py --lengths 512,4096 --batch 8 --only jax,flash

The model is a decoder of flax.nnx with parameters at random; it takes the most likely token each time. Each length is that of a
cache that is full when the last token has been generated. The ways differ in what the attention modules take as `attention_fn`:

    jax        Flax's own attention, which reads all of the cache and writes the scores
    cudnn      jax.nn.dot_product_attention(implementation="cudnn"), told how many keys there are; on NVIDIA GPUs only
    flash      jaxsoftmax.flax.attention_fn

It prints which implementation of jaxsoftmax runs, tokens/s of all sequences together, and by how much the logits of the first
new token differ from those of the first way. Plot and numbers go to --out. Time is that of the wall clock, the median of some
runs, of a whole loop over tokens on the device.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jaxsoftmax
from jaxsoftmax.flax import attention_fn

# The ways, and what the figure calls them.
WAYS = {"jax": "Flax's own attention", "cudnn": "cuDNN", "flash": "jaxsoftmax.flax.attention_fn"}
DTYPES = ("float32", "bfloat16")
VOCABULARY = 256
RUNS = 3
# What is chosen where the command line does not say.
ON_GPU = {"lengths": [1024, 4096, 16384, 65536], "layers": 8, "width": 4096, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
ELSEWHERE = {"lengths": [128, 512, 2048], "layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "dtype": "float32"}


class InputError(Exception):
    """Something that the user gave cannot be used; the message is the one line to show."""


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array, **_: Any) -> jax.Array:
    """CuDNN's attention to the keys that are in the cache, which Flax's mask of it counts."""
    lengths = jnp.sum(mask[:, 0, 0] != 0, -1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, implementation="cudnn")


ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "jax": nnx.dot_product_attention,
    "cudnn": cudnn,
    "flash": attention_fn,
}


class Setting(NamedTuple):
    """Of what size and kind the model is."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    batch: int
    dtype: str
    seed: int


class Block(nnx.Module):
    """Attention with a cache, and an MLP, each behind a norm."""

    def __init__(self, setting: Setting, attention: Callable[..., jax.Array], rngs: nnx.Rngs):
        types: Any = {"dtype": setting.dtype, "param_dtype": setting.dtype, "rngs": rngs}
        options: Any = {"use_bias": False, "decode": True, "keep_rngs": False, **types}
        self.attention_norm = nnx.RMSNorm(setting.width, **types)
        self.attention = nnx.MultiHeadAttention(
            setting.heads, setting.width, num_kv_heads=setting.kv_heads, attention_fn=attention, **options
        )
        self.hidden_norm = nnx.RMSNorm(setting.width, **types)
        self.hidden = nnx.Linear(setting.width, 4 * setting.width, use_bias=False, **types)
        self.output = nnx.Linear(4 * setting.width, setting.width, use_bias=False, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.output(nnx.gelu(self.hidden(self.hidden_norm(x))))


class Decoder(nnx.Module):
    """From a token of each sequence, `[batch, 1]`, to the logits of the next one."""

    def __init__(self, setting: Setting, attention: Callable[..., jax.Array], rngs: nnx.Rngs):
        types: Any = {"dtype": setting.dtype, "param_dtype": setting.dtype, "rngs": rngs}
        self.embedding = nnx.Embed(VOCABULARY, setting.width, **types)
        self.blocks = nnx.List([Block(setting, attention, rngs) for _ in range(setting.layers)])
        self.norm = nnx.RMSNorm(setting.width, **types)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x)).astype(jnp.float32)


def parts(setting: Setting, way: str, length: int) -> tuple[Any, Callable[[jax.Array], tuple[Any, Any]]]:
    """The graph of a model with a cache of this length, and a function of a key: its parameters and an empty cache."""

    def make(key: jax.Array) -> Decoder:
        model = Decoder(setting, ATTENTION[way], nnx.Rngs(key))
        for block in model.blocks:
            block.attention.init_cache((setting.batch, length, setting.width), setting.dtype)
        return model

    graph, *_ = nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Cache, ...)

    def split(key: jax.Array) -> tuple[Any, Any]:
        _, cache, params = nnx.split(make(key), nnx.Cache, ...)
        return params, cache

    return graph, split


def filled(cache: Any, index: int, key: jax.Array) -> Any:
    """A cache that holds so many tokens already, at random: how long a step takes does not depend on what they are."""
    keys = iter(jax.random.split(key, len(jax.tree.leaves(cache))))

    def fill(leaf: jax.Array) -> jax.Array:
        own = next(keys)
        return jnp.full_like(leaf, index) if leaf.ndim == 0 else jax.random.normal(own, leaf.shape, leaf.dtype)

    return jax.tree.map(fill, cache)


def generate(graph: Any, params: Any, cache: Any, tokens: jax.Array, count: int) -> tuple[Any, jax.Array, jax.Array]:
    """The cache, the logits of the first new token and `count` new tokens of each sequence, `[batch, count]`."""

    def step(carry: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], tuple[jax.Array, jax.Array]]:
        cache, tokens = carry
        model = nnx.merge(graph, cache, params)
        logits = model(tokens)
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        return (nnx.state(model, nnx.Cache), tokens), (logits[:, 0], tokens[:, 0])

    (cache, _), (logits, found) = jax.lax.scan(step, (cache, tokens), length=count)
    return cache, logits[0], found.T


class Speed(NamedTuple):
    """How fast a way is: None where it ran out of memory."""

    way: str
    length: int
    tokens_per_second: float | None


def measure(setting: Setting, ways: list[str], length: int, count: int) -> tuple[list[Speed], dict[str, float]]:
    """How fast the ways generate `count` tokens that fill a cache, and by how much their logits differ from the first's."""
    speeds: list[Speed] = []
    differences: dict[str, float] = {}
    expected: np.ndarray | None = None
    key, tokens = jax.random.key(setting.seed), jnp.zeros((setting.batch, 1), jnp.int32)
    fill = jax.jit(filled, static_argnums=1)
    program = jax.jit(generate, static_argnums=(0, 4), donate_argnums=2)
    for way in ways:
        graph, split = parts(setting, way, length)
        try:
            params, empty = jax.jit(split)(key)
            times = []
            for _ in range(1 + RUNS):  # the first one compiles
                cache = jax.block_until_ready(fill(empty, length - count, key))
                start = time.perf_counter()
                _, logits, found = program(graph, params, cache, tokens, count)
                jax.block_until_ready(found)
                times.append(time.perf_counter() - start)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            speeds.append(Speed(way, length, None))
            continue
        speeds.append(Speed(way, length, setting.batch * count / statistics.median(times[1:])))
        first = np.asarray(logits)
        expected = first if expected is None else expected
        differences[way] = float(np.max(np.abs(first - expected)) / np.max(np.abs(expected)))
    return speeds, differences


def explained(setting: Setting, length: int) -> str:
    """What runs of jaxsoftmax in a step."""
    graph, split = parts(setting, "flash", length)
    params, cache = jax.eval_shape(split, jax.random.key(0))
    token = jax.ShapeDtypeStruct((setting.batch, 1), jnp.int32)
    return str(jaxsoftmax.explain(lambda params, cache, token: nnx.merge(graph, cache, params)(token), params, cache, token))


def plot(path: Path, speeds: list[Speed], title: str) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way, name in WAYS.items():
        own = [(speed.length, speed.tokens_per_second) for speed in speeds if speed.way == way and speed.tokens_per_second]
        if own:
            axes.plot(*np.array(own).T, "o-", label=name)
    axes.set(xlabel="tokens in the cache", ylabel="tokens/s", xscale="log", yscale="log", title=title)
    axes.legend(frameon=False)
    axes.grid(which="both", alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def some_lengths(text: str) -> list[int]:
    """Positive integers, in rising order and each once."""
    return sorted({whole(part) for part in text.split(",")})


def some_ways(text: str) -> list[str]:
    """Some of the ways, in their own order."""
    if unknown := [part for part in text.split(",") if part not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(WAYS)}")
    return [way for way in WAYS if way in text.split(",")]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    codes = "Exit codes: 0 done, 2 bad input (nothing was written), 130 interrupted."
    parser = Parser(description="Generate tokens with a cache, and measure tokens/s against its length.", epilog=codes)

    def add(name: str, kind: Any, text: str, **options: Any) -> None:
        """An option whose default depends on the platform."""
        values = (defaults[name] for defaults in (ON_GPU, ELSEWHERE))
        on_gpu, elsewhere = (",".join(map(str, v)) if isinstance(v, list) else v for v in values)
        text = f"{text} (default: {on_gpu} on a GPU, {elsewhere} elsewhere)"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text, **options)

    add("lengths", some_lengths, "tokens in a full cache, several with commas between them", metavar="N,...")
    add("layers", whole, "blocks of the model", metavar="N")
    add("width", whole, "features of each token", metavar="N")
    add("heads", whole, "attention heads; must divide the width", metavar="N")
    add("kv_heads", whole, "heads of keys and values; must divide the heads", metavar="N")
    add("dtype", None, "of parameters, cache and arithmetic", choices=DTYPES)
    parser.add_argument("--batch", type=whole, default=1, metavar="N", help="sequences at once (default: %(default)s)")
    parser.add_argument("--tokens", type=whole, default=32, metavar="N", help="to generate (default: %(default)s)")
    parser.add_argument("--seed", type=whole, default=1, metavar="N", help="of parameters and cache (default: %(default)s)")
    only_help = f"which ways to run, of {','.join(WAYS)} (default: all that run here)"
    parser.add_argument("--only", type=some_ways, metavar="WAY,...", help=only_help)
    out = Path("runs/generate")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="where the results go (default: %(default)s)")
    args = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    for name, value in (ON_GPU if on_gpu else ELSEWHERE).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.only is None:
        args.only = [way for way in WAYS if on_gpu or way != "cudnn"]
    if "cudnn" in args.only and not on_gpu:
        raise InputError("argument --only: cudnn needs an NVIDIA GPU, and JAX sees none")
    if "cudnn" in args.only and args.dtype == "float32":
        raise InputError("argument --only: cudnn needs --dtype bfloat16")
    if args.width % args.heads:
        raise InputError(f"argument --heads: {args.heads} is not a divisor of --width {args.width}")
    if args.heads % args.kv_heads:
        raise InputError(f"argument --kv-heads: {args.kv_heads} is not a divisor of --heads {args.heads}")
    if args.lengths[0] <= args.tokens:
        raise InputError(f"argument --lengths: {args.lengths[0]} must be more than --tokens {args.tokens}")
    return args


def compare(args: argparse.Namespace) -> None:
    setting = Setting(args.layers, args.width, args.heads, args.kv_heads, args.batch, args.dtype, args.seed)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"argument --out: {args.out} cannot be used: {error.strerror}") from error
    heads = f"{setting.heads} heads on {setting.kv_heads} of keys, of {setting.width // setting.heads}"
    title = f"{setting.layers} layers, {heads}, batch {setting.batch}, {setting.dtype}, {jax.devices()[0].device_kind}"
    print(f"{title}; jax {jax.__version__}, flax {flax.__version__}\n\n{explained(setting, args.lengths[0])}\n")
    print(f"{'length':>8}  {'way':6} {'tokens/s':>10}  difference of logits")
    speeds: list[Speed] = []
    for length in args.lengths:
        own, differences = measure(setting, args.only, length, args.tokens)
        for speed in own:
            shown = "no memory" if speed.tokens_per_second is None else f"{speed.tokens_per_second:.1f}"
            print(f"{length:8}  {speed.way:6} {shown:>10}  {differences.get(speed.way, float('nan')):.2g}")
        speeds += own
    plot(args.out / "tokens_per_second.png", speeds, title)
    with (args.out / "tokens_per_second.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Speed._fields, *speeds])
    print(f"\nwrote tokens_per_second.png and tokens_per_second.csv to {args.out}")


def main(argv: list[str] | None = None) -> int:
    try:
        compare(parse_arguments(argv))
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{Path(__file__).name}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
