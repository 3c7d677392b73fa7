"""Train a small transformer language model over bytes, with jaxsoftmax inside its attention.

    uv run examples/train_tiny_lm.py                    # a bar says how long it still takes
    uv run examples/train_tiny_lm.py --attention jax    # the same run through jax.nn.softmax
    uv run examples/train_tiny_lm.py --resume           # go on after Ctrl-C, with identical results
    uv run examples/train_tiny_lm.py --resume --steps 2000    # go on after a run of 1000 steps is finished
    uv run examples/train_tiny_lm.py --compare          # flash, softmax and jax, one after another: losses and tokens/s
    uv run --extra cuda13 examples/train_tiny_lm.py --preset small --compare    # a model of GPT-2's size, on a GPU

The default text is the documentation that CPython ships (pydoc_data.topics), each paragraph once. The last tenth of the
text is held out: no step trains on it, and its loss in bits per byte stands beside that of a trigram model fitted to
the same training part. The loss curve, the results and the checkpoint go to --out, which
generate.py takes as --checkpoint.

Three attentions compute the same from the same parameters: `flash` is jaxsoftmax.dot_product_attention, which never holds
all scores, `softmax` and `jax` hold them, and make weights of them with jaxsoftmax.softmax and jax.nn.softmax.

Three losses are the same in float32, too: `cross_entropy` is jaxsoftmax.cross_entropy, `linear` is
jaxsoftmax.linear_cross_entropy, which never holds all logits, and in bfloat16 rounds them, and `optax` is
optax.softmax_cross_entropy_with_integer_labels. --vocabulary 50257 gives the model as many logits as GPT-2 has, of which bytes
are the first ones, to measure speed and memory.

On several devices --mesh says how they share the work, and losses are the same but for rounding. `data` shares the windows
of a batch, `sequence` the bytes of a window, and `vocabulary` the rows of the embedding, which is the last layer too: no
device has all logits. Eight CPU devices will do to try it:

    JAX_NUM_CPU_DEVICES=8 uv run examples/train_tiny_lm.py --mesh data=2,sequence=2,vocabulary=2
"""

from examples import startup

if __name__ == "__main__":
    startup.importing("JAX, Flax and what else is needed")

import argparse
import contextlib
import gc
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxsoftmax

BYTES = 256
HELD_OUT_SHARE = 0.1
HELD_OUT_LIMIT = 2**16  # bytes of the held-out part that an evaluation reads: all of it for the default text
STEPS_PER_CALL = 10
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, about {remaining} left, {rate_fmt}{postfix}]"
# What a run's numbers follow from, so what a resumed run must share with the run that it continues.
RECORDED = ("steps", "batch", "context", "width", "heads", "layers", "dtype", "lr", "seed", "attention", "deterministic")
RECORDED += ("eval_every", "loss", "vocabulary")
# What the options are that are not given. `small` has the layers of GPT-2 small and is to measure speed, hence the last one.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 1000,
        "batch": 16,
        "context": 128,
        "width": 128,
        "heads": 4,
        "layers": 4,
        "dtype": "float32",
        "lr": 5e-3,
        "eval_every": 100,
        "checkpoint_every": 200,
        "out": Path("runs/tiny_lm"),
        "deterministic": True,
    },
    "small": {
        "steps": 300,  # the default text is read more than ten times
        "batch": 16,
        "context": 1024,
        "width": 768,
        "heads": 12,
        "layers": 12,
        "dtype": "bfloat16",
        "lr": 6e-4,
        "eval_every": 50,
        "checkpoint_every": 300,  # of one gigabyte
        "out": Path("runs/small_lm"),
        "deterministic": False,
    },
}

# The axes of --mesh, and the options that they share.
MESH = {"data": "batch", "sequence": "context", "vocabulary": "vocabulary"}
TOKENS = P("data", "sequence")  # how (batch, time) is sharded

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # query, key and value: (batch, time, head, feature)
Softmax = Callable[[jax.Array, jax.Array, float], jax.Array]


class InputError(Exception):
    """Something that the user gave cannot be used; the message is the one line to show."""


# The two ways to turn scores into attention weights: `where` is False for the keys that a query must not see.


def jaxsoftmax_weights(scores: jax.Array, where: jax.Array, scale: float) -> jax.Array:
    return jaxsoftmax.softmax(scores, axis=-1, where=where, scale=scale)


def jax_weights(scores: jax.Array, where: jax.Array, scale: float) -> jax.Array:
    return jax.nn.softmax(scores * scale, axis=-1, where=where)


def materialised(softmax: Softmax, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention that holds the scores of all pairs of times in memory."""
    length, size = query.shape[1], query.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    causal = jnp.tril(jnp.ones((1, 1, length, length), dtype=bool))
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores, causal, size**-0.5), value)


def flash(query: jax.Array, key: jax.Array, value: jax.Array, deterministic: bool) -> jax.Array:
    # jaxsoftmax sees XLA's flag in the environment, but not among the options of jax.jit: so it is told.
    scale = query.shape[-1] ** -0.5
    options = {"is_causal": True, "deterministic_gradients": deterministic}
    return jaxsoftmax.dot_product_attention(query, key, value, scale=scale, **options)


ATTENTIONS: dict[str, Callable[[bool], Attend]] = {
    "flash": lambda deterministic: partial(flash, deterministic=deterministic),
    "softmax": lambda _: partial(materialised, jaxsoftmax_weights),
    "jax": lambda _: partial(materialised, jax_weights),
}


# What figures call them.
NAMES = {"flash": "jaxsoftmax.dot_product_attention", "softmax": "jaxsoftmax.softmax", "jax": "jax.nn.softmax"}


def explained(args: argparse.Namespace, attention: str, platform: str | None = None) -> Sequence[Any]:
    """What runs an attention and its gradients in this run's shapes and dtype."""
    attend = ATTENTIONS[attention](args.deterministic)
    operand = jax.ShapeDtypeStruct((args.batch, args.context, args.heads, args.width // args.heads), args.dtype)

    def total(*operands: jax.Array) -> jax.Array:
        return attend(*operands).astype(jnp.float32).sum()

    return jaxsoftmax.explain(jax.grad(total, (0, 1, 2)), operand, operand, operand, platform=platform)


def choose_attention(args: argparse.Namespace, platform: str | None = None) -> tuple[str, str]:
    """The attention to train with, flash where kernels run all of it, and a line that says what runs it."""
    name, why = args.attention or "flash", ""
    decisions = explained(args, name, platform)
    refused = [(one.primitive, reason) for one in decisions for _, reason in one.refusals]
    if refused and args.attention is None:
        name, why = "softmax", "; not flash, as no kernel runs {} ({})".format(*refused[0])
        decisions = explained(args, name, platform)
    found = [f"{one.primitive} by {one.implementation}" for one in decisions] or ["jax.nn.softmax"]
    return name, f"attention: {name}, {', '.join(dict.fromkeys(found))}{why}"


def rotate(x: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Rotary positions: turns each pair of features of (batch, time, head, feature) by an angle growing with time.

    `start` is the position of the first time, where those before it are in a cache.
    """
    half = x.shape[-1] // 2
    speeds = 1000.0 ** (-np.arange(half, dtype=np.float32) / half)
    angles = (start + np.arange(x.shape[1])).astype(np.float32)[:, None] * speeds[None, :]
    cosine, sine = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cosine - right * sine, left * sine + right * cosine], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int, attend: Attend, dtype: str, rngs: nnx.Rngs):
        self.heads = heads
        self.attend = attend
        zeros = nnx.initializers.zeros
        self.inputs = nnx.Linear(width, 3 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(width, width, use_bias=False, kernel_init=zeros, dtype=dtype, rngs=rngs)

    def operands(self, x: jax.Array, start: jax.Array | int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value of what begins at position `start`."""
        batch, length, width = x.shape
        per_head = self.inputs(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = jnp.unstack(per_head, axis=2)
        return rotate(query, start), rotate(key, start), value

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(self.attend(*self.operands(x)).reshape(x.shape))


class Block(nnx.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, attend: Attend, dtype: str, rngs: nnx.Rngs):
        zeros = nnx.initializers.zeros
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention = Attention(width, heads, attend, dtype, rngs)
        self.hidden_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, use_bias=False, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(4 * width, width, use_bias=False, kernel_init=zeros, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.output(jnp.square(nnx.relu(self.hidden(self.hidden_norm(x)))))


class LanguageModel(nnx.Module):
    """Bytes (batch, time) in, logits of the next byte (batch, time, vocabulary) out.

    Layers compute in `dtype`. Parameters, what norms sum over, and these logits are float32 in any case.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, attend: Attend, dtype: str, rngs: nnx.Rngs):
        self.dtype = dtype
        self.embedding = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, attend, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, dtype=jnp.float32, rngs=rngs)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """What the last layer gets, in float32."""
        x = self.embedding(tokens.astype(jnp.int32)).astype(self.dtype)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embedding.attend(self.hidden(tokens))


def on_mesh() -> bool:
    return not jax.sharding.get_abstract_mesh().empty


def as_tokens(array: jax.Array) -> jax.Array:
    """What belongs to (batch, time), shared by the devices of a mesh: all that is computed of it is sharded as it is."""
    return jax.lax.with_sharding_constraint(array, TOKENS) if on_mesh() else array


# What gives the losses of the bytes (batch, time), or with the reduction "mean" their mean.
Loss = Callable[[LanguageModel, jax.Array, jax.Array, Any], jax.Array]  # of the model, tokens, targets and the reduction


def of_logits(loss: Callable[[jax.Array, jax.Array], jax.Array]) -> Loss:
    def losses(model: LanguageModel, tokens: jax.Array, targets: jax.Array, reduction: str) -> jax.Array:
        found = loss(model(tokens), targets.astype(jnp.int32))
        return found.mean() if reduction == "mean" else found

    return losses


def of_hidden(model: LanguageModel, tokens: jax.Array, targets: jax.Array, reduction: Any) -> jax.Array:
    operands = model.hidden(tokens).astype(model.dtype), model.embedding.embedding[...], targets
    loss = partial(jaxsoftmax.linear_cross_entropy, class_axis=0, reduction=reduction)
    if not on_mesh():
        return loss(*operands)

    def on_shard(*shards: jax.Array) -> jax.Array:
        """Of a device's tokens, from all parts of the vocabulary. XLA by itself would gather tokens of two sharded axes."""
        found = loss(*shards, axis_name="vocabulary")
        return jax.lax.pmean(found, tuple(TOKENS)) if reduction == "mean" else found

    out = P() if reduction == "mean" else TOKENS
    return jax.shard_map(on_shard, in_specs=(TOKENS, P("vocabulary"), TOKENS), out_specs=out)(*operands)


LOSSES: dict[str, Loss] = {
    "cross_entropy": of_logits(jaxsoftmax.cross_entropy),
    "linear": of_hidden,
    "optax": of_logits(optax.softmax_cross_entropy_with_integer_labels),
}


class Trigram:
    """A byte trigram model with interpolated Kneser-Ney smoothing: the classical model to beat."""

    def __init__(self, text: np.ndarray):
        first, second, third = (text[i : len(text) - 2 + i].astype(np.int64) for i in range(3))
        codes = (first * BYTES + second) * BYTES + third
        counts = np.bincount(codes, minlength=BYTES**3).reshape((BYTES,) * 3).astype(np.uint32)
        # The shorter contexts count in how many different surroundings a byte was seen, not how often.
        self.levels = [self._level(c) for c in ((counts > 0).any(0).sum(0), (counts > 0).sum(0), counts)]

    @staticmethod
    def _level(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = min(max(once / max(once + 2 * twice, 1), 0.1), 0.9)
        return counts, counts.sum(-1), (counts > 0).sum(-1), discount

    def probability(self, first: np.ndarray, second: np.ndarray, third: np.ndarray) -> np.ndarray:
        """The probability that `third` follows `first` and `second`, element by element."""
        probability = np.full(np.shape(third), 1 / BYTES)
        for (counts, totals, kinds, discount), context in zip(self.levels, [(), (second,), (first, second)], strict=True):
            seen = np.maximum(counts[(*context, third)] - discount, 0.0)
            total = totals[context]
            mixed = (seen + discount * kinds[context] * probability) / np.maximum(total, 1)
            probability = np.where(total > 0, mixed, probability)
        return probability

    def bits_per_byte(self, text: np.ndarray) -> float:
        """Mean over the bytes of `text` from the third on."""
        return float(-np.log2(self.probability(text[:-2], text[1:-1], text[2:])).mean())


class TrainState(NamedTuple):
    """Everything that a step changes; each batch follows from the seed and `step` alone."""

    step: jax.Array
    params: nnx.State
    optimizer: optax.OptState
    losses: jax.Array  # of each step so far, in nats


class Run(NamedTuple):
    """The first state of a run, and its compiled functions."""

    state: TrainState
    train: Callable[[TrainState, jax.Array, int], TrainState]  # (state, text, stop): steps until `stop`
    evaluate: Callable[[nnx.State, jax.Array, jax.Array], jax.Array]
    sample: Callable[[nnx.State, jax.Array], jax.Array]


class Data(NamedTuple):
    """The two parts of the text, and what the trigram model of the one makes of the other."""

    training: np.ndarray
    held_out: np.ndarray
    trigram_bits: float


def default_text() -> bytes:
    """CPython's own documentation. A paragraph that several topics repeat is kept once: none is both read and held out."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def load_text(path: Path | None, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The training part and the held-out part, as bytes."""
    name = "the default text" if path is None else f"text file {path}"
    try:
        text = np.frombuffer(default_text() if path is None else path.read_bytes(), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte in it
        raise InputError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    if not text.size:
        raise InputError(f"{name} is empty")
    held_out = int(text.size * HELD_OUT_SHARE)
    parts = text[: text.size - held_out], text[text.size - held_out :]
    needed = max(context, 2) + 1
    for part, kind in zip(parts, ("training", "held-out"), strict=True):
        if part.size < needed:
            raise InputError(
                f"{name} is too short: its {kind} part has {part.size} bytes, and --context {context} needs {needed}"
            )
    return parts


def learning_rate(step: jax.Array, peak: float, steps: int) -> jax.Array:
    """A short rise to `peak`, then a straight fall to almost zero at the last step."""
    done = step.astype(jnp.float32)
    return peak * jnp.minimum((done + 1.0) / max(1, min(50, steps // 10)), 1.0 - done / steps)


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    schedule = partial(learning_rate, peak=args.lr, steps=args.steps)
    matrices = partial(jax.tree.map, lambda param: param.ndim > 1)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_model(args: argparse.Namespace, key: jax.Array) -> LanguageModel:
    attend = ATTENTIONS[args.attention](args.deterministic)
    return LanguageModel(args.vocabulary, args.width, args.heads, args.layers, attend, args.dtype, nnx.Rngs(key))


def make_run(args: argparse.Namespace) -> Run:
    """Builds the model and compiles nothing yet."""
    init_key, data_key, sample_key = jax.random.split(jax.random.key(args.seed), 3)
    graph, params = nnx.split(make_model(args, init_key))
    optimizer = make_optimizer(args)
    # Makes a GPU add in a fixed order, so that a seed fixes the result there too; a CPU always does.
    options = {"xla_gpu_deterministic_ops": args.deterministic}

    def loss(params: nnx.State, windows: jax.Array, reduction: str = "mean") -> jax.Array:
        tokens, targets = as_tokens(windows[:, :-1]), as_tokens(windows[:, 1:])
        return LOSSES[args.loss](nnx.merge(graph, params), tokens, targets, reduction)

    def step(text: jax.Array, state: TrainState) -> TrainState:
        key = jax.random.fold_in(data_key, state.step)
        starts = jax.random.randint(key, (args.batch, 1), 0, text.size - args.context)
        windows = text[starts + jnp.arange(args.context + 1)[None, :]]
        value, gradient = jax.value_and_grad(loss)(state.params, windows)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state, state.losses.at[state.step].set(value))

    # The bounds are no constants, so that one program serves every count of steps: a program per count could round
    # differently, and a resumed run, which stops elsewhere, would drift from the run that it continues.
    @partial(jax.jit, donate_argnums=0, compiler_options=options)
    def train(state: TrainState, text: jax.Array, stop: int) -> TrainState:
        return jax.lax.fori_loop(state.step, stop, lambda _, state: step(text, state), state)

    @partial(jax.jit, compiler_options=options)
    def evaluate(params: nnx.State, windows: jax.Array, scored: jax.Array) -> jax.Array:
        def batch_loss(batch: tuple[jax.Array, jax.Array]) -> jax.Array:
            windows, scored = batch
            return jnp.where(scored, loss(params, windows, "none"), 0.0).sum()

        return jax.lax.map(batch_loss, (windows, scored))

    @partial(jax.jit, compiler_options=options)
    def sample(params: nnx.State, prompt: jax.Array) -> jax.Array:
        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, params)(window[None])[0, -1, :BYTES]
            token = jax.random.categorical(key, logits).astype(window.dtype)
            return jnp.append(window[1:], token), token

        return jax.lax.scan(next_byte, prompt, jax.random.split(sample_key, args.sample_length))[1]

    state = TrainState(jnp.int32(0), params, optimizer.init(params), jnp.zeros(args.steps, jnp.float32))
    return Run(state, train, evaluate, sample)


def held_out_windows(text: np.ndarray, context: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches of overlapping windows, and which of their targets to score.

    Each byte from the third on is scored once (a trigram model has nothing to say about the first two), all but those
    of the first window with at least half a context before them.
    """
    last = len(text) - context - 1
    starts = np.append(np.arange(0, last, max(1, context // 2)), last)
    targets = starts[:, None] + np.arange(1, context + 1)[None, :]
    scored = targets > np.append(1, targets[:-1, -1])[:, None]
    windows = text[starts[:, None] + np.arange(context + 1)[None, :]]
    padding = ((0, -len(starts) % batch), (0, 0))
    windows, scored = np.pad(windows, padding), np.pad(scored, padding)
    return windows.reshape(-1, batch, context + 1), scored.reshape(-1, batch, context)


# A checkpoint is a directory save_<number>: the arrays, written by orbax, and record.json, with the settings, the held-out
# history and the digest of each file. It gets its name when it is complete, and only then does the one before it go: there
# is a whole checkpoint at every moment, and a run that starts over in an old --out keeps the old one until it has its own.


def checkpoints(out: Path) -> list[Path]:
    """Complete checkpoints, the newest last."""
    saves = [path for path in out.glob("checkpoints/save_*") if path.name.removeprefix("save_").isdecimal()]
    return sorted(saves, key=lambda path: int(path.name.removeprefix("save_")))


def file_digests(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def record_digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def table(state: Any) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def save_checkpoint(out: Path, state: Any, record: dict[str, Any]) -> None:
    older = checkpoints(out)
    number = 1 + (int(older[-1].name.removeprefix("save_")) if older else 0)
    unfinished = out.absolute() / "checkpoints" / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(unfinished / "arrays", jax.tree.map(np.asarray, table(state)))
    record = {**record, "files": file_digests(unfinished / "arrays")}
    (unfinished / "record.json").write_text(json.dumps({**record, "digest": record_digest(record)}, indent=1) + "\n")
    unfinished.rename(unfinished.with_name(f"save_{number}"))
    for path in older:
        shutil.rmtree(path)


def is_finished(record: dict[str, Any]) -> bool:
    """Tells whether a run has come to its last step, after which it is evaluated."""
    held_out = record.get("held_out")  # grpo_tiny.py, which shares checkpoints, has no such evaluations
    return bool(held_out) and held_out[-1][0] == record["settings"]["steps"]


def read_record(save: Path, settings: dict[str, Any] | None, option: str) -> dict[str, Any]:
    """The record of a checkpoint, once it and the files beside it are as they were saved, and it has these settings."""
    record = json.loads((save / "record.json").read_text())
    if record.pop("digest") != record_digest(record):
        raise ValueError("record.json has changed")
    saved, files = record["settings"], file_digests(save / "arrays")
    settings = {name: saved[name] for name in (*saved, *RECORDED)} if settings is None else settings
    differing = [name for name in {**saved, **settings} if saved.get(name) != settings.get(name)]
    if differing and not (differing == ["steps"] and is_finished(record) and settings["steps"] > saved["steps"]):
        changes = "; ".join(f"{name} was {saved.get(name)}, now {settings.get(name)}" for name in differing)
        raise InputError(f"{option}: {save} is of another run: {changes}")
    for name, expected in record.pop("files").items():
        if files.get(name) != expected:
            raise ValueError(f"arrays/{name} {'has changed' if name in files else 'is missing'}")
    return record


def read_checkpoint(
    out: Path, settings: dict[str, Any] | None, option: str
) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """Where the newest checkpoint is, its record and its arrays.

    It must have these settings; None for any. `option` is the one that asks for it, for what is said of one that is damaged.
    """
    saves = checkpoints(out)
    if not saves:
        raise InputError(f"{option}: no checkpoint in {out}")
    try:
        record = read_record(saves[-1], settings, option)
        with ocp.StandardCheckpointer() as checkpointer:
            return saves[-1], record, checkpointer.restore(saves[-1].absolute() / "arrays")
    except InputError:
        raise
    except Exception as error:  # whatever a mangled file makes the readers raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{option}: checkpoint {saves[-1]} is damaged ({reason})") from error


def on_devices(state: TrainState, mesh: jax.sharding.Mesh | None) -> TrainState:
    """The state on all devices of a mesh: of the embedding and its moments each has some rows, and of the rest everything."""
    if mesh is None:
        return state
    specs = [P("vocabulary") if "embedding" in name else P() for name in table(state)]
    shardings = jax.tree.unflatten(jax.tree.structure(state), [NamedSharding(mesh, spec) for spec in specs])
    return jax.device_put(state, shardings)


def laid_out(like: Any, arrays: dict[str, np.ndarray], save: Path, option: str) -> Any:
    """The arrays of a checkpoint in the structure of `like`, if they have its shapes and dtypes."""
    fresh = table(like)
    for name in {**arrays, **fresh}:
        # Checked here: what orbax is given a shape or a type for, it may cut or cast to fit.
        saved, asked = (f"{x[name].dtype}{list(x[name].shape)}" if name in x else "absent" for x in (arrays, fresh))
        if saved != asked:
            raise InputError(f"{option}: {name} is {saved} in checkpoint {save}, and this program has it {asked}")
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[name]) for name in fresh])


def restore_checkpoint(out: Path, state: TrainState, settings: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
    """The state of the newest checkpoint, laid out as `state`, and its record; a finished run may get more steps."""
    save, record, arrays = read_checkpoint(out, settings, "--resume")
    more = settings["steps"] - record["settings"]["steps"]
    if more:
        arrays["losses"] = np.pad(arrays["losses"], (0, more))
        print(f"a finished run goes on to step {settings['steps']}, with the learning rate of a run of so many")
    return laid_out(state, arrays, save, "--resume"), record | {"settings": settings}


def trained(out: Path, option: str) -> tuple[LanguageModel, argparse.Namespace]:
    """The model of the newest checkpoint, for other programs, and the settings that it was trained with."""
    save, record, arrays = read_checkpoint(out, None, option)
    settings = argparse.Namespace(**record["settings"])
    graph, params = nnx.split(nnx.eval_shape(partial(make_model, settings), jax.random.key(0)))
    arrays = {name: array for name, array in arrays.items() if name.startswith("params/")}
    return nnx.merge(graph, laid_out({"params": params}, arrays, save, option)["params"]), settings


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, so that the steps under way end; a second Ctrl-C acts at once."""
    event = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is not signal.default_int_handler:
        yield event
        return

    def handle(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


def tokens_per_second(args: argparse.Namespace, steps: int, record: dict[str, Any]) -> float:
    return steps * args.batch * args.context / record["seconds"]


def train(args: argparse.Namespace, run: Run, state: TrainState, record: dict[str, Any], data: Data) -> TrainState:
    """Trains to the last step and adds to the record's held-out history; after a Ctrl-C, saves and raises."""
    text = jnp.asarray(data.training)
    windows, scored = map(jnp.asarray, held_out_windows(data.held_out, args.context, args.batch))
    step = int(state.step)
    bar = tqdm(total=args.steps, initial=step, unit="step", mininterval=0.5, dynamic_ncols=True, bar_format=BAR)
    with bar, deferred_interrupt() as interrupted:
        if step < args.steps:
            state = jax.block_until_ready(run.train(state, text, step))  # no steps: compiles, which no speed includes
            bar.unpause()  # nor does the estimate of what is left
        while step < args.steps:
            began = time.perf_counter()
            marks = (STEPS_PER_CALL, args.eval_every, args.checkpoint_every)
            stop = min(args.steps, *(step + every - step % every for every in marks))
            state = run.train(state, text, stop)
            loss = float(np.asarray(state.losses)[stop - 1])
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {stop}: try a smaller --lr")
            record["seconds"] += time.perf_counter() - began
            speed = f"{tokens_per_second(args, stop, record):,.0f} tokens/s"
            bar.set_postfix_str(f"{loss / math.log(2):.3f} bits/byte, {speed}", refresh=False)
            bar.update(stop - step)
            step = stop
            if step % args.eval_every == 0 or step == args.steps:
                nats = np.asarray(run.evaluate(state.params, windows, scored), np.float64).sum()
                bits = float(nats / int(scored.sum()) / math.log(2))
                record["held_out"].append([step, bits])
                bar.write(f"step {step}: held out {bits:.3f} bits/byte (trigram {data.trigram_bits:.3f})", file=sys.stdout)
            if step % args.checkpoint_every == 0 or step == args.steps or interrupted.is_set():
                save_checkpoint(args.out, state, record)
            if interrupted.is_set():
                raise KeyboardInterrupt(f" after step {step}; --resume continues from there")
    return state


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def smooth_bits(losses: Sequence[float] | np.ndarray) -> tuple[int, np.ndarray]:
    """Running means of losses, in bits per byte, and over how many steps each is."""
    span = max(1, min(20, len(losses) // 10))
    return span, np.convolve(np.asarray(losses) / math.log(2), np.full(span, 1 / span), mode="valid")


@contextlib.contextmanager
def loss_plot(path: Path, title: str) -> Iterator[Axes]:
    """Axes to draw losses into, in bits per byte, which become a PNG."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")  # no pyplot: needs no display, and leaves no state behind
    axes = figure.add_subplot()
    yield axes
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replaced(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def plot_losses(path: Path, losses: np.ndarray, held_out: list[list[float]], trigram_bits: float) -> None:
    span, smooth = smooth_bits(losses)
    with loss_plot(path, "Byte-level language model") as axes:
        axes.plot(np.arange(span, len(losses) + 1), smooth, label=f"training (mean of {span} steps)", alpha=0.7)
        axes.plot(*np.transpose(held_out), marker="o", label="held out")
        axes.axhline(trigram_bits, color="gray", linestyle="--", label="trigram, held out")


def plot_comparison(path: Path, finished: dict[str, dict[str, Any]]) -> None:
    widths = iter((5, 3, 1))  # one curve within the other: they hardly differ
    span, _ = smooth_bits(next(iter(finished.values()))["training_losses_nats"])
    with loss_plot(path, f"Training with each attention: loss, mean of {span} steps") as axes:
        for name, one in finished.items():
            span, smooth = smooth_bits(one["training_losses_nats"])
            axes.plot(np.arange(span, span + len(smooth)), smooth, label=NAMES[name], linewidth=next(widths))


def readable(text: np.ndarray) -> str:
    """Bytes as text for the terminal, with a mark for what it cannot show."""
    decoded = text.tobytes().decode("utf-8", errors="replace")
    shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, errors="replace").decode(encoding)


def peak_memory() -> int | None:
    """Prints and returns the largest number of bytes of the device's memory in use; None where JAX does not count them."""
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if memory is not None:
        print(f"at most {memory / 1e9:.2f} GB of the device's memory were in use")
    return memory


def report(args: argparse.Namespace, run: Run, state: TrainState, record: dict[str, Any], data: Data) -> dict[str, Any]:
    """Prints the result and a sample, and writes the loss curve and the numbers, which it returns."""
    losses = np.asarray(state.losses)
    bits = record["held_out"][-1][1]
    prompt = data.held_out[: args.context]
    sample = np.asarray(run.sample(state.params, jnp.asarray(prompt)))
    speed = tokens_per_second(args, args.steps, record)
    print(f"trained at {speed:,.0f} tokens/s, evaluations and compilation left out")
    memory = peak_memory()
    print(f"held out: {bits:.3f} bits/byte; a trigram model of the same split: {data.trigram_bits:.3f} bits/byte")
    print(f"sample, after {args.context} held-out bytes that end in {readable(prompt[-30:])!r}:\n{readable(sample)}")
    results = {
        "settings": record["settings"],
        "held_out_bits_per_byte": bits,
        "trigram_bits_per_byte": data.trigram_bits,
        "tokens_per_second": speed,
        "peak_bytes_in_use": memory,
        "held_out_history": record["held_out"],
        "training_losses_nats": losses.tolist(),
        "sample": sample.tobytes().decode("utf-8", errors="replace"),
    }
    plot_losses(args.out / "loss.png", losses, record["held_out"], data.trigram_bits)
    with replaced(args.out / "results.json") as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {args.out / 'loss.png'} and {args.out / 'results.json'}")
    return results


def positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive {'number' if kind is float else 'integer'}")
        return value

    return parse


def seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 4294967295")
    return int(text)


def mesh_sizes(text: str) -> dict[str, int]:
    """How many devices each axis of the mesh has, 1 where the text does not name it."""
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name for name, _, _ in pairs]
    if unknown := [name for name in names if name not in MESH]:
        raise argparse.ArgumentTypeError(f"{text!r} names {unknown[0]!r}, and the axes are {', '.join(MESH)}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis twice")
    return dict.fromkeys(MESH, 1) | {name: positive(int)(size) for name, _, size in pairs}


def make_mesh(sizes: dict[str, int], args: argparse.Namespace) -> jax.sharding.Mesh:
    count, given = math.prod(sizes.values()), ",".join(f"{name}={size}" for name, size in sizes.items())
    if count != jax.device_count():
        raise InputError(f"--mesh {given} takes {count} devices, and JAX sees {jax.device_count()}")
    for axis, option in MESH.items():
        if getattr(args, option) % sizes[axis]:
            raise InputError(f"--{option} {getattr(args, option)} cannot be shared evenly by {axis}={sizes[axis]} of --mesh")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    description = "Train a small transformer language model over bytes, with jaxsoftmax inside its attention."
    codes = "Exit codes: 0 done, 1 cannot go on, 2 bad input (nothing was written), 130 interrupted (--resume goes on)."
    parser = Parser(description=description, epilog=codes)

    def add(name: str, text: str, **options: Any) -> None:
        """An option whose default is that of the preset, or is given."""
        preset = {kind: values.get(name[2:].replace("-", "_")) for kind, values in PRESETS.items()}
        default = options.get("default", ", ".join(f"{kind} {value}" for kind, value in preset.items()))
        parser.add_argument(name, help=f"{text} (default: {default})", **options)

    whole, number = positive(int), positive(float)
    preset_help = "what the other options are by default; small is a model of the size of GPT-2 small, for a GPU"
    add("--preset", preset_help, default="tiny", choices=PRESETS)
    text_help = "train on this file instead of CPython's documentation; its last tenth is held out, scored up to 64 KiB"
    parser.add_argument("--text", type=Path, metavar="FILE", help=text_help)
    add("--steps", "optimizer steps", type=whole)
    add("--batch", "windows of text in a step", type=whole)
    add("--context", "bytes that the model sees at once", type=whole)
    add("--width", "features of each byte inside the model", type=whole)
    add("--heads", "attention heads; must divide the width into even parts", type=whole)
    add("--layers", "transformer layers", type=whole)
    add("--dtype", "of the computation; parameters, the norms' sums and the loss are float32", choices=("float32", "bfloat16"))
    add("--lr", "highest learning rate", type=number)
    add("--seed", "fixes the run, from the first parameters to the sample", type=seed, default=0)
    attention_help = "what computes attention (default: flash where kernels run it and its gradients, else softmax)"
    parser.add_argument("--attention", choices=ATTENTIONS, help=attention_help)
    add("--loss", "what computes the loss", choices=LOSSES, default="cross_entropy")
    vocabulary_help = "logits of the model, 256 or more, of which the first are those of bytes"
    add("--vocabulary", vocabulary_help, type=whole, default=BYTES)
    mesh_help = "how devices share the work, as in data=2,sequence=2,vocabulary=2: by windows, by bytes of them, by logits"
    parser.add_argument("--mesh", help=f"{mesh_help} (default: one device)", type=mesh_sizes, metavar="AXIS=DEVICES,...")
    compare_help = "train with each attention, in folders of their own below --out, and compare losses and tokens/s"
    parser.add_argument("--compare", action="store_true", help=compare_help)
    deterministic_help = "have a GPU add in a fixed order, so that the seed fixes the run there too, which costs speed"
    add("--deterministic", deterministic_help, action=argparse.BooleanOptionalAction)
    add("--eval-every", "steps between held-out evaluations", type=whole, metavar="STEPS")
    add("--checkpoint-every", "steps between checkpoints", type=whole, metavar="STEPS")
    add("--sample-length", "bytes to generate at the end", type=whole, metavar="BYTES", default=400)
    out_help = "where the results go; a run already there stays until the new one has a checkpoint and results of its own"
    add("--out", out_help, type=Path, metavar="DIR")
    resume_help = (
        "continue from the checkpoint in --out, with --deterministic bit for bit; give the options but --mesh as before. A"
        " finished run goes on to more --steps, with the learning rate of a run of so many"
    )
    parser.add_argument("--resume", action="store_true", help=resume_help)
    args = parser.parse_args(argv)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.width % args.heads or args.width // args.heads % 2:
        raise InputError(f"--heads {args.heads} does not divide --width {args.width} into equal, even parts")
    if args.vocabulary < BYTES:
        raise InputError(f"--vocabulary {args.vocabulary} is less than {BYTES}, the number of bytes")
    args.mesh = None if args.mesh is None else make_mesh(args.mesh, args)
    if args.compare and args.attention:
        raise InputError(f"--attention {args.attention} cannot be given with --compare, which trains with each")
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is not a directory")
    return args


@contextlib.contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turns JAX's error into MemoryError, which says what was too large."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(f"{what} runs out of memory: try a smaller --batch") from None


def mesh_of(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """A context in which programs run on the mesh, if there is one."""
    return contextlib.nullcontext() if args.mesh is None else jax.set_mesh(args.mesh)


def begin(args: argparse.Namespace, text: str) -> tuple[Run, TrainState, dict[str, Any]]:
    """The functions of a run, and the state and the record that it starts from."""
    settings = {name: getattr(args, name) for name in RECORDED} | {"text": text}
    run = make_run(args)
    state, record = run.state, {"settings": settings, "held_out": [], "seconds": 0.0}
    if args.resume:
        state, record = restore_checkpoint(args.out, run.state, settings)
    return run, on_devices(state, args.mesh), record


def make_folder(out: Path) -> None:
    try:
        (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot use --out {out}: {error.strerror}") from error


def train_one(args: argparse.Namespace, text: str, training: np.ndarray, held_out: np.ndarray) -> None:
    args.attention, line = choose_attention(args)
    with memory_errors(f"--attention {args.attention}"), mesh_of(args):
        run, state, record = begin(args, text)
        make_folder(args.out)
        print(line)
        data = Data(training, held_out, Trigram(training).bits_per_byte(held_out))
        report(args, run, train(args, run, state, record, data), record, data)


def compare(args: argparse.Namespace, text: str, training: np.ndarray, held_out: np.ndarray) -> None:
    """Trains with each attention, one after another. `--resume` continues those that have a checkpoint."""
    runs = [argparse.Namespace(**{**vars(args), "attention": name, "out": args.out / name}) for name in ATTENTIONS]
    for one in runs:
        one.resume = args.resume and bool(checkpoints(one.out))
        if one.resume:
            with memory_errors(f"--attention {one.attention}"), mesh_of(one):
                begin(one, text)  # so that one that is not of this run is refused before another one is trained
    if args.resume and not any(one.resume for one in runs):
        raise InputError(f"--resume: no checkpoint in {' or '.join(str(one.out) for one in runs)}")
    for one in runs:
        make_folder(one.out)
    data = Data(training, held_out, Trigram(training).bits_per_byte(held_out))
    finished = {}
    for one in runs:
        print(f"\n{choose_attention(one)[1]}")
        try:
            with memory_errors(f"--attention {one.attention}"), mesh_of(one):
                run, state, record = begin(one, text)
                finished[one.attention] = report(one, run, train(one, run, state, record, data), record, data)
        except MemoryError as error:
            print(error)
        run = state = record = None  # makes room on the GPU for the next one
        gc.collect()
    if not finished:
        raise MemoryError("no attention has enough memory: try a smaller --batch")
    plot_comparison(args.out / "comparison.png", finished)
    print(comparison(args, finished))
    print(f"wrote {args.out / 'comparison.png'}")


def comparison(args: argparse.Namespace, finished: dict[str, dict[str, Any]]) -> str:
    """The table of what the attentions that had enough memory came to."""
    losses = np.asarray([one["training_losses_nats"] for one in finished.values()])
    span, _ = smooth_bits(losses[0])
    device = jax.devices()[0].device_kind
    lines = [
        f"\n{args.steps} steps of {args.batch} x {args.context} bytes in {args.dtype} on {device}, jax {jax.__version__};"
        f"{' deterministic;' if args.deterministic else ''} bits/byte, training over the last {span} steps:",
        f"{'attention':10} {'training':>10} {'held out':>10} {'tokens/s':>12} {'over jax':>9}",
    ]
    for name in ATTENTIONS:
        if name not in finished:
            lines.append(f"{name:10} out of memory")
            continue
        one = finished[name]
        training, speed = smooth_bits(one["training_losses_nats"])[1][-1], one["tokens_per_second"]
        over = f"{speed / finished['jax']['tokens_per_second']:.2f}x" if "jax" in finished else "-"
        lines.append(f"{name:10} {training:10.4f} {one['held_out_bits_per_byte']:10.4f} {speed:12,.0f} {over:>9}")
    if len(finished) > 1:
        apart = np.ptp(losses, axis=0) / math.log(2)
        lines.append(f"largest difference of the curves: {apart.max():.2g} bits/byte, at step {apart.argmax() + 1}")
    return "\n".join(lines)


def train_and_report(args: argparse.Namespace) -> None:
    training, held_out = load_text(args.text, args.context)
    text_digest = hashlib.sha256(training.tobytes() + held_out.tobytes()).hexdigest()
    text = f"{training.size + held_out.size} bytes with SHA-256 {text_digest[:16]}"
    (compare if args.compare else train_one)(args, text, training, held_out[:HELD_OUT_LIMIT])


def exit_code(script: str, work: Callable[[], None]) -> int:
    """Does the work of a script, turns an error or an interrupt into one line on standard error, and returns the exit code."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells each of its steps there
    try:
        work()
    except InputError as error:
        print(f"{Path(script).name}: error: {error}", file=sys.stderr)
        return 2
    except (OSError, FloatingPointError, MemoryError) as error:
        print(f"{Path(script).name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"{Path(script).name}: interrupted{interrupt}", file=sys.stderr)
        return 130
    return 0


def main(argv: list[str] | None = None) -> int:
    return exit_code(__file__, lambda: train_and_report(parse_arguments(argv)))


if __name__ == "__main__":
    startup.imported()
    sys.exit(main())
