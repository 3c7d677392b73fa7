"""Generate tokens with a Flax model and its cache of keys and values, and measure tokens/s and what sampling costs.

    uv run examples/generate.py                                   # small enough for a CPU
    uv run --extra cuda13 examples/generate.py                    # on a GPU
    uv run examples/generate.py --lengths 512,4096 --batch 8 --only jax,flash
    uv run --extra cuda13 examples/generate.py --vocabulary 128256 --top-k 50 --top-p 0.9
    uv run examples/generate.py --checkpoint runs/tiny_lm --prompt "The " --temperature 0.8 --min-p 0.05

Without --checkpoint the model is a decoder of flax.nnx with parameters at random; it takes the most likely token each time, and
tokens/s are measured against the length of the cache. Each length is that of a cache that is full when the last token has been
generated. The ways differ in what the attention modules take as `attention_fn`:

    jax        Flax's own attention, which reads all of the cache and writes the scores
    cudnn      jax.nn.dot_product_attention(implementation="cudnn"), told how many keys there are; on NVIDIA GPUs only
    flash      jaxsoftmax.flax.attention_fn

It prints tokens/s of all sequences together, and by how much the logits of the first new token differ from those of the first
way. Plot and numbers go to --out.

With --checkpoint the model is what train_tiny_lm.py trained, with the attention of jaxsoftmax: it goes on from --prompt. The
text and the numbers go to --out, too, where it is given.

Both print which implementation of jaxsoftmax runs. With --temperature, --top-k, --top-p or --min-p, and always with a
checkpoint, the same loop runs with each way to choose a token:

    none         the logits are computed, and no more than one number of each row is looked at
    argmax       the most likely one
    jaxsoftmax   a sample of jaxsoftmax.categorical; these are the ones whose text is printed
    jax          a sample of jax.random.categorical, of what jax.lax.top_k and a cumulative sum leave

The share is that of choosing: what a step takes beyond one with none, of its own time. It may be below 0 where it is less than
noise. Time is that of the wall clock, the median of some runs, of a whole loop over tokens on the device, without the prompt.
"""

import argparse
import csv
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jaxsoftmax
from examples import train_tiny_lm
from examples.axes import label_logarithmic
from examples.train_tiny_lm import InputError, Parser
from jaxsoftmax.flax import attention_fn

# The ways, and what the figure calls them.
WAYS = {"jax": "Flax's own attention", "cudnn": "cuDNN", "flash": "jaxsoftmax.flax.attention_fn"}
DTYPES = ("float32", "bfloat16")
RUNS = 5
TINY = float(jnp.finfo(jnp.float32).tiny)
# What is chosen where the command line does not say.
ON_GPU = {"lengths": [1024, 4096, 16384, 65536], "layers": 8, "width": 4096, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
ELSEWHERE = {"lengths": [128, 512, 2048], "layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "dtype": "float32"}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


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
    vocabulary: int
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
        self.embedding = nnx.Embed(setting.vocabulary, setting.width, **types)
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


class Cached(train_tiny_lm.Attention):
    """A trained attention with a cache. It sees as many tokens back as it did when it was trained."""

    def __init__(self, attention: train_tiny_lm.Attention, window: int, shape: tuple[int, ...], dtype: str):
        self.heads, self.inputs, self.output = attention.heads, attention.inputs, attention.output
        self.window = window
        self.key, self.value = (nnx.Cache(jnp.zeros(shape, dtype)) for _ in range(2))
        self.index = nnx.Cache(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        start = self.index[...]
        query, *new = self.operands(x, start)
        for cache, part in zip((self.key, self.value), new, strict=True):
            cache[...] = jax.lax.dynamic_update_slice_in_dim(cache[...], part, start, 1)
        self.index[...] = end = start + x.shape[1]
        lengths = jnp.full(x.shape[0], end)
        found = jaxsoftmax.dot_product_attention(
            query,
            self.key[...],
            self.value[...],
            key_value_seq_lengths=lengths,
            is_causal=True,
            query_offset=start,
            local_window_size=(self.window - 1, 0),
        )
        return self.output(found.reshape(x.shape))


class Trained(nnx.Module):
    """A language model over bytes with a cache for so many tokens of so many sequences."""

    def __init__(self, model: train_tiny_lm.LanguageModel, settings: argparse.Namespace, batch: int, length: int):
        shape = batch, length, settings.heads, settings.width // settings.heads
        for block in model.blocks:
            block.attention = Cached(block.attention, settings.context, shape, settings.dtype)
        self.model = model

    def __call__(self, tokens: jax.Array) -> jax.Array:
        logits = self.model(tokens)
        is_byte = np.arange(logits.shape[-1]) < train_tiny_lm.BYTES
        return jnp.where(is_byte[None, None], logits, -jnp.inf)  # the others have no text


# From a key and logits `[batch, vocabulary]` to a token of each sequence.
Choose = Callable[[jax.Array, jax.Array], jax.Array]


def none(_: jax.Array, logits: jax.Array) -> jax.Array:
    """Token 0 or 1. The barrier is for XLA not to leave out the other logits."""
    return (jax.lax.optimization_barrier(logits)[:, 0] > 0).astype(jnp.int32)


def argmax(_: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, -1).astype(jnp.int32)


def by_jax(
    key: jax.Array, logits: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> jax.Array:
    """What jaxsoftmax.categorical draws from, in JAX's own functions. Of what `top_k` leaves out, nothing is computed."""
    if temperature == 0:
        return argmax(key, logits)
    logits, indices = logits / temperature, None
    if top_k is not None or top_p is not None:
        size = logits.shape[-1]
        logits, indices = jax.lax.top_k(logits, size if top_k is None else min(top_k, size))
    if top_p is not None:
        weights = jax.nn.softmax(logits)
        logits = jnp.where(jnp.cumsum(weights, -1) - weights < max(top_p, TINY), logits, -jnp.inf)
    if min_p is not None:
        logits = jnp.where(logits >= jnp.max(logits, -1, keepdims=True) + jnp.log(min_p), logits, -jnp.inf)
    found = jax.random.categorical(key, logits)
    found = found if indices is None else jnp.take_along_axis(indices, found[:, None], -1)[:, 0]
    return found.astype(jnp.int32)


def ways_to_choose(args: argparse.Namespace) -> dict[str, Choose]:
    """The ways to choose a token, by their names: argmax alone where nothing else is asked for."""
    options = {name: getattr(args, name) for name in SAMPLING}
    if args.checkpoint is None and all(value is None for value in options.values()):
        return {"argmax": argmax}
    options["temperature"] = 1.0 if args.temperature is None else args.temperature
    samplers = {"jaxsoftmax": partial(jaxsoftmax.categorical, **options), "jax": partial(by_jax, **options)}
    return {"none": none, "argmax": argmax, **samplers}


def step(graph: Any, params: Any, cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """The cache with these tokens, `[batch, count]`, and the logits of the one after them."""
    model = nnx.merge(graph, cache, params)
    logits = model(tokens)[:, -1]
    return nnx.state(model, nnx.Cache), logits


def generate(
    graph: Any, params: Any, cache: Any, tokens: jax.Array, key: jax.Array, count: int, choose: Choose
) -> tuple[Any, jax.Array]:
    """The cache, and the `count` tokens of each sequence that follow `tokens`, its last one: `[batch, count]`."""

    def one(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
        cache, logits = step(graph, params, *carry)
        found = choose(key, logits)
        return (cache, found[:, None]), found

    (cache, _), found = jax.lax.scan(one, (cache, tokens), jax.random.split(key, count))
    return cache, found.T


def timed(
    graph: Any, params: Any, fill: Callable[[], Any], tokens: jax.Array, key: jax.Array, count: int, ways: Mapping[str, Choose]
) -> dict[str, tuple[float, jax.Array]]:
    """Tokens/s with each way to choose, and what each has chosen, after a cache that `fill` makes anew each time."""
    program = jax.jit(generate, static_argnums=(0, 5, 6), donate_argnums=2)
    found, times = {}, {name: [] for name in ways}
    for _ in range(1 + RUNS):  # the first one compiles
        for name, choose in ways.items():  # in turn, so that a clock that changes changes all
            cache = jax.block_until_ready(fill())
            start = time.perf_counter()
            _, found[name] = jax.block_until_ready(program(graph, params, cache, tokens, key, count, choose))
            times[name].append(time.perf_counter() - start)
    return {name: (len(tokens) * count / statistics.median(times[name][1:]), found[name]) for name in ways}


class Speed(NamedTuple):
    """How fast a way is with a way to choose: None where it ran out of memory."""

    way: str
    length: int
    choosing: str
    tokens_per_second: float | None


def measure(
    setting: Setting, ways: list[str], length: int, count: int, choices: Mapping[str, Choose]
) -> tuple[list[Speed], dict[str, float]]:
    """How fast the ways generate `count` tokens that fill a cache, and by how much their logits differ from the first's."""
    speeds: list[Speed] = []
    differences: dict[str, float] = {}
    expected: np.ndarray | None = None
    key, tokens = jax.random.key(setting.seed), jnp.zeros((setting.batch, 1), jnp.int32)
    for way in ways:
        graph, split = parts(setting, way, length)
        try:
            params, empty = jax.jit(split)(key)
            fill = partial(jax.jit(filled, static_argnums=1), empty, length - count, key)
            own = timed(graph, params, fill, tokens, key, count, choices)
            _, logits = jax.jit(step, static_argnums=0, donate_argnums=2)(graph, params, fill(), tokens)
            first = np.asarray(logits)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            speeds += [Speed(way, length, name, None) for name in choices]
            continue
        speeds += [Speed(way, length, name, speed) for name, (speed, _) in own.items()]
        expected = first if expected is None else expected
        differences[way] = float(np.max(np.abs(first - expected)) / np.max(np.abs(expected)))
    return speeds, differences


HEADER = f"{'choosing':10} {'tokens/s':>10} {'share':>9}"


def shown(choosing: str, speed: float | None, of_none: float | None) -> str:
    """The columns that both tables have, under HEADER, with the share where it is known; for None there was no memory."""
    if speed is None:
        return f"{choosing:10} {'no memory':>10} {'':9}"
    share = "" if choosing == "none" or of_none is None else f"{1 - speed / of_none:.1%}"
    return f"{choosing:10} {speed:10.1f} {share:>9}"


def explained(graph: Any, params: Any, cache: Any, tokens: Any, choices: Mapping[str, Choose]) -> str:
    """What runs of jaxsoftmax in a step."""
    choose, key = choices.get("jaxsoftmax", argmax), jax.random.key(0)

    def one(*operands: Any) -> jax.Array:
        return choose(key, step(graph, *operands)[1])

    return str(jaxsoftmax.explain(one, params, cache, tokens))


def plot(path: Path, speeds: list[Speed], title: str) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for way, name in WAYS.items():
        of_way = [speed for speed in speeds if (speed.way, speed.choosing) == (way, "argmax")]
        own = [(speed.length, speed.tokens_per_second) for speed in of_way if speed.tokens_per_second]
        if own:
            axes.plot(*np.array(own).T, "o-", label=name)
    axes.set(xlabel="tokens in the cache", ylabel="tokens/s", yscale="log", title=title)
    label_logarithmic(axes, sorted({speed.length for speed in speeds}))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


whole = train_tiny_lm.positive(int)


def number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            allowed = f"number of {least:g} or more" if most == math.inf else f"number from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {allowed}")
        return value

    return parse


def some_lengths(text: str) -> list[int]:
    """Positive integers, in rising order and each once."""
    return sorted({whole(part) for part in text.split(",")})


def some_ways(text: str) -> list[str]:
    """Some of the ways, in their own order."""
    if unknown := [part for part in text.split(",") if part not in WAYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(WAYS)}")
    return [way for way in WAYS if way in text.split(",")]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    codes = "Exit codes: 0 done, 2 bad input (nothing was written), 130 interrupted."
    parser = Parser(description="Generate tokens with a cache, and measure tokens/s and what sampling costs.", epilog=codes)

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
    option = parser.add_argument
    option("--vocabulary", type=whole, metavar="N", help="tokens that there are (default: 256)")
    only_help = f"which ways to run, of {','.join(WAYS)} (default: all that run here)"
    option("--only", type=some_ways, metavar="WAY,...", help=only_help)
    option("--out", type=Path, metavar="DIR", help="where the results go (default: runs/generate; with --checkpoint nowhere)")
    checkpoint_help = (
        "go on from --prompt with the model that train_tiny_lm.py left there; takes --out alone of the options above"
    )
    option("--checkpoint", type=Path, metavar="DIR", help=checkpoint_help)
    option("--prompt", metavar="TEXT", help="what the text begins with (default: 'The ')")
    option(
        "--temperature", type=number(0, math.inf), metavar="X", help="divides logits; at 0 the largest is taken (default: 1)"
    )
    option("--top-k", type=whole, metavar="N", help="sample from so many of the most likely tokens (default: all)")
    option("--top-p", type=number(0, 1), metavar="X", help="from the most likely ones of this weight together (default: all)")
    option("--min-p", type=number(0, 1), metavar="X", help="from those of this share of the largest weight (default: all)")
    option("--batch", type=whole, default=1, metavar="N", help="sequences at once (default: %(default)s)")
    option("--tokens", type=whole, metavar="N", help="to generate (default: 32, with --checkpoint 256)")
    option("--seed", type=train_tiny_lm.seed, default=1, metavar="N", help="of all that is at random (default: %(default)s)")
    args = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    here = [way for way in WAYS if on_gpu or way != "cudnn"]
    defaults = (ON_GPU if on_gpu else ELSEWHERE) | {"vocabulary": 256, "only": here, "out": Path("runs/generate")}
    if args.checkpoint is not None:
        if given := [name for name in defaults if name != "out" and getattr(args, name) is not None]:
            raise InputError(f"argument --{given[0].replace('_', '-')}: not allowed with argument --checkpoint")
        defaults = {"prompt": "The ", "tokens": 256}
    elif args.prompt is not None:
        raise InputError("argument --prompt: needs --checkpoint")
    for name, value in ({"tokens": 32} | defaults).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.checkpoint is not None:
        if not args.prompt:
            raise InputError("argument --prompt: is empty, and the model needs a byte to begin with")
        return args
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


def titled(layers: int, heads: str, batch: int, dtype: str) -> str:
    return f"{layers} layers, {heads}, batch {batch}, {dtype}, {jax.devices()[0].device_kind}"


def versions(vocabulary: int) -> str:
    return f"vocabulary {vocabulary}; jax {jax.__version__}, flax {flax.__version__}"


def go_on(args: argparse.Namespace) -> None:
    """Prints how fast a trained model goes on from the prompt, and the text of what it says."""
    model, settings = train_tiny_lm.trained(args.checkpoint, "argument --checkpoint")
    if args.out is not None:
        make_folder(args.out)
    prompt = np.frombuffer(os.fsencode(args.prompt), np.uint8)
    tokens = jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (args.batch, len(prompt)))
    before, last = jnp.split(tokens, [len(prompt) - 1], 1)
    graph, empty, params = nnx.split(Trained(model, settings, args.batch, len(prompt) + args.tokens), nnx.Cache, ...)

    prefill = jax.jit(step, static_argnums=0)

    def fill() -> Any:
        return prefill(graph, params, empty, before)[0] if before.size else jax.tree.map(jnp.copy, empty)

    choices = ways_to_choose(args)
    heads = f"{settings.heads} heads of {settings.width // settings.heads}"
    print(f"{titled(settings.layers, heads, args.batch, settings.dtype)}, {versions(settings.vocabulary)}\n")
    print(f"{explained(graph, params, empty, last, choices)}\n\n{HEADER}")
    own = timed(graph, params, fill, last, jax.random.key(args.seed), args.tokens, choices)
    for name, (speed, _) in own.items():
        print(shown(name, speed, own["none"][0]))
    texts = [train_tiny_lm.readable(np.append(prompt, row)) for row in np.asarray(own["jaxsoftmax"][1], np.uint8)]
    print(*(f"\n{text}" for text in texts), sep="\n")
    if args.out is not None:
        length = len(prompt) + args.tokens
        write_speeds(args.out, [Speed("flash", length, name, speed) for name, (speed, _) in own.items()])
        (args.out / "text.txt").write_text("\n\n".join(texts) + "\n")
        print(f"\nwrote text.txt and tokens_per_second.csv to {args.out}")


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"argument --out: {out} cannot be used: {error.strerror}") from error


def write_speeds(out: Path, speeds: list[Speed]) -> None:
    with (out / "tokens_per_second.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Speed._fields, *speeds])


def compare(args: argparse.Namespace) -> None:
    sizes = args.layers, args.width, args.heads, args.kv_heads
    setting = Setting(*sizes, args.vocabulary, args.batch, args.dtype, args.seed)
    make_folder(args.out)
    heads = f"{setting.heads} heads on {setting.kv_heads} of keys, of {setting.width // setting.heads}"
    title = titled(setting.layers, heads, setting.batch, setting.dtype)
    choices = ways_to_choose(args)
    graph, split = parts(setting, "flash", args.lengths[0])
    params, cache = jax.eval_shape(split, jax.random.key(0))
    token = jax.ShapeDtypeStruct((setting.batch, 1), jnp.int32)
    print(f"{title}, {versions(setting.vocabulary)}\n")
    print(f"{explained(graph, params, cache, token, choices)}\n\n{'length':>8}  {'way':6} {HEADER}  difference of logits")
    speeds: list[Speed] = []
    for length in args.lengths:
        own, differences = measure(setting, args.only, length, args.tokens, choices)
        of_none = {speed.way: speed.tokens_per_second for speed in own if speed.choosing == "none"}
        for way, _, choosing, speed in own:
            columns = shown(choosing, speed, of_none.get(way))
            print(f"{length:8}  {way:6} {columns}  {differences.get(way, math.nan):.2g}")
        speeds += own
    plot(args.out / "tokens_per_second.png", speeds, title)
    write_speeds(args.out, speeds)
    print(f"\nwrote tokens_per_second.png and tokens_per_second.csv to {args.out}")


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_arguments(argv)
        (compare if args.checkpoint is None else go_on)(args)
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{Path(__file__).name}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
