"""Variants of attention as score and mask functions, and each written out on whole arrays.

A variant is made from a random generator and the sizes of a call. It has the arrays that its functions close over, the two
functions of these arrays, and `written(arrays, scores, batch, head, query, key)`, which returns scores and a mask from index
arrays that broadcast, `[batch, 1, 1, 1]` to `[keys]`, and shares no code with the functions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call of attention."""

    batch: int
    queries: int
    keys: int
    heads: int

    @property
    def longest(self) -> int:
        return max(self.queries, self.keys)


@dataclass(frozen=True)
class Variant:
    """One variant for one call."""

    score_mod: Callable[..., Callable[..., Any]] | None = None  # the function from the arrays
    mask_mod: Callable[..., Callable[..., Any]] | None = None
    written: Callable[..., tuple[Any, Any]] = lambda arrays, s, b, h, q, k: (s, True)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def moving(self) -> dict[str, np.ndarray]:
        """The arrays that have derivatives."""
        return {name: array for name, array in self.arrays.items() if array.dtype.kind == "f"}

    def functions(self, arrays) -> dict[str, Any]:
        """Returns the arguments of `dot_product_attention`."""
        made = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: make(arrays) for name, make in made.items() if make is not None}


def written_out(variant: Variant, arrays, query, key, value):
    """Computes attention of a variant with all scores in memory, in the dtype of the operands, and its log-sum-exp."""
    (batch, queries, heads, size), (keys, key_heads) = query.shape, key.shape[1:3]
    key, value = (jnp.repeat(x, heads // key_heads, 2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") / np.sqrt(size)
    index = np.meshgrid(*map(np.arange, (batch, heads, queries, keys)), indexing="ij", sparse=True)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        scores, seen = variant.written(arrays, scores, *index)
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(jax.lax.stop_gradient(scores), -1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    # Where a row sees nothing, its exponentials are 0, and so is the output.
    exponentials = jnp.where(scores == -jnp.inf, 0, jnp.exp(jnp.where(scores == -jnp.inf, 0, scores) - top))
    sums = jnp.sum(exponentials, -1, keepdims=True)
    weights = exponentials / jnp.where(sums == 0, 1, sums)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")
    lse = jnp.where(sums == 0, -jnp.inf, jnp.log(jnp.where(sums == 0, 1, sums)) + top)[..., 0]
    return out, jnp.swapaxes(lse, 1, 2)


def causal(rng, sizes):
    return Variant(
        mask_mod=lambda a: lambda b, h, q, k: k <= q,
        written=lambda a, s, b, h, q, k: (s, q - k >= 0),
    )


def window(rng, sizes):
    return Variant(
        mask_mod=lambda a: lambda b, h, q, k: (q >= k) & (q - k < 7),
        written=lambda a, s, b, h, q, k: (s, (k <= q) & (k > q - 7)),
    )


def prefix(rng, sizes):
    """Each sequence has a prefix of its own, which all of its queries see."""
    lengths = rng.integers(0, sizes.keys + 1, sizes.batch).astype(np.int32)
    return Variant(
        mask_mod=lambda a: lambda b, h, q, k: (k < a["lengths"][b]) | (k <= q),
        written=lambda a, s, b, h, q, k: (s, (k < np.asarray(lengths).reshape(-1, 1, 1, 1)) | (k <= q)),
        arrays={"lengths": lengths},
    )


def documents(rng, sizes):
    numbers = np.sort(rng.integers(0, 4, (sizes.batch, sizes.longest)), 1).astype(np.int32)
    return Variant(
        mask_mod=lambda a: lambda b, h, q, k: (a["numbers"][b, q] == a["numbers"][b, k]) & (k <= q),
        written=lambda a, s, b, h, q, k: (
            s,
            (numbers[:, None, : sizes.queries, None] == numbers[:, None, None, : sizes.keys]) & (k <= q),
        ),
        arrays={"numbers": numbers},
    )


def dilated(rng, sizes):
    return Variant(
        mask_mod=lambda a: lambda b, h, q, k: (k <= q) & ((q - k) % 3 == 0),
        written=lambda a, s, b, h, q, k: (s, (k <= q) & (np.mod(q - k, 3) == 0)),
    )


def alibi(rng, sizes):
    slopes = 2.0 ** (-8 * np.arange(1, sizes.heads + 1) / sizes.heads)

    def of_slopes(a):
        return lambda s, b, h, q, k: s - a["slopes"][h] * (q - k).astype(s.dtype)

    return Variant(
        score_mod=of_slopes,
        written=lambda a, s, b, h, q, k: (s - a["slopes"][:, None, None] * (q - k), True),
        arrays={"slopes": slopes},
    )


def _bucket(distance, xp):
    """Returns T5's bucket of a distance: of 16 one way, 8 exact ones and 8 that grow by logarithm up to 64."""
    behind = xp.where(distance > 0, 16, 0)
    distance = xp.abs(distance)
    large = 8 + (xp.log(xp.maximum(distance, 1).astype(np.float32) / 8) / math.log(8) * 8).astype(np.int32)
    return behind + xp.where(distance < 8, distance, xp.minimum(large, 15))


def t5(rng, sizes):
    table = rng.standard_normal((32, sizes.heads))
    return Variant(
        score_mod=lambda a: lambda s, b, h, q, k: s + a["table"][_bucket(k - q, jnp), h],
        written=lambda a, s, b, h, q, k: (s + jnp.moveaxis(a["table"][_bucket(k - q, np)[0, 0]], -1, 0), True),
        arrays={"table": table},
    )


def relative(rng, sizes):
    table = rng.standard_normal((sizes.heads, 2 * sizes.longest - 1))
    return Variant(
        score_mod=lambda a: lambda s, b, h, q, k: s + a["table"][h, q - k + sizes.longest - 1],
        written=lambda a, s, b, h, q, k: (s + a["table"][:, (q - k + sizes.longest - 1)[0, 0]], True),
        arrays={"table": table},
    )


def tanh_cap(rng, sizes):
    return Variant(
        score_mod=lambda a: lambda s, b, h, q, k: 1.5 * jnp.tanh(s / 1.5),
        mask_mod=lambda a: lambda b, h, q, k: k <= q,
        written=lambda a, s, b, h, q, k: (1.5 * jnp.tanh(s / 1.5), k <= q),
    )


def gated(rng, sizes):
    gates = rng.standard_normal((sizes.heads, sizes.queries))
    return Variant(
        score_mod=lambda a: lambda s, b, h, q, k: s * jax.nn.sigmoid(s + a["gates"][h, q]),
        written=lambda a, s, b, h, q, k: (s / (1 + jnp.exp(-s - a["gates"][:, :, None])), True),
        arrays={"gates": gates},
    )


SIDE = 4  # of a window of Swin, and of an image


def swin(rng, sizes):
    """Tokens are those of an image in rows; the bias is that of the distance in two dimensions."""
    rows = -(-sizes.longest // SIDE)
    table = rng.standard_normal((2 * rows - 1, 2 * SIDE - 1, sizes.heads))

    def score_mod(a):
        def of_score(s, b, h, q, k):
            down, right = q // SIDE - k // SIDE, q % SIDE - k % SIDE
            return s + a["table"][down + rows - 1, right + SIDE - 1, h]

        return of_score

    def written(a, s, b, h, q, k):
        (qd, qr), (kd, kr) = (np.divmod(x.ravel(), SIDE) for x in (q, k))
        bias = a["table"][qd[:, None] - kd + rows - 1, qr[:, None] - kr + SIDE - 1]
        return s + jnp.moveaxis(bias, -1, 0), True

    return Variant(score_mod, written=written, arrays={"table": table})


def neighbourhood(rng, sizes):
    """A token of an image sees those up to one step away in each direction."""

    def of_pairs(b, h, q, k):
        return (jnp.abs(q // SIDE - k // SIDE) <= 1) & (jnp.abs(q % SIDE - k % SIDE) <= 1)

    def written(a, s, b, h, q, k):
        (qd, qr), (kd, kr) = np.divmod(q, SIDE), np.divmod(k, SIDE)
        return s, (np.maximum(np.abs(qd - kd), np.abs(qr - kr)) <= 1)

    return Variant(mask_mod=lambda a: of_pairs, written=written)


def tree(rng, sizes):
    """A tree of guesses, as in speculative decoding: a token sees itself and its ancestors, from a table of bools."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(sizes.longest)])
    sees = np.zeros((sizes.longest, sizes.longest), bool)
    for i in range(sizes.longest):
        at = i
        while at >= 0:
            sees[i, at], at = True, parents[at]
    return Variant(
        mask_mod=lambda a: lambda b, h, q, k: a["sees"][q, k],
        written=lambda a, s, b, h, q, k: (s, sees[: sizes.queries, : sizes.keys]),
        arrays={"sees": sees},
    )


def soft_documents(rng, sizes):
    """Documents see each other with a penalty that is learned."""
    numbers = np.sort(rng.integers(0, 4, (sizes.batch, sizes.longest)), 1).astype(np.int32)
    penalty = np.asarray(rng.standard_normal())

    def score_mod(a):
        def of_score(s, b, h, q, k):
            return jnp.where(a["numbers"][b, q] == a["numbers"][b, k], s, s - a["penalty"])

        return of_score

    def written(a, s, b, h, q, k):
        same = numbers[:, None, : sizes.queries, None] == numbers[:, None, None, : sizes.keys]
        return s - a["penalty"] * ~same, True

    return Variant(score_mod, written=written, arrays={"numbers": numbers, "penalty": penalty})


def temperature(rng, sizes):
    return Variant(
        score_mod=lambda a: lambda s, b, h, q, k: s / jnp.exp(a["temperatures"][h]),
        written=lambda a, s, b, h, q, k: (s * jnp.exp(-a["temperatures"][:, None, None]), True),
        arrays={"temperatures": rng.standard_normal(sizes.heads)},
    )


def hiding(rng, sizes):
    """A score function hides by -inf, whole rows too."""
    return Variant(
        score_mod=lambda a: lambda s, b, h, q, k: jnp.where((k <= q - 2) | (h == 1), 2 * s, -jnp.inf),
        written=lambda a, s, b, h, q, k: (2 * s, (k <= q - 2) | (h == 1)),
    )


_MASKS = (causal, window, prefix, documents, dilated, neighbourhood, tree)
_SCORES = (alibi, t5, relative, tanh_cap, gated, swin, soft_documents, temperature, hiding)
VARIANTS = {make.__name__: make for make in (*_MASKS, *_SCORES)}
