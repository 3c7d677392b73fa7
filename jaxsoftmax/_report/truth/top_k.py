"""The truth of `top_k` and of samples, by NumPy: the order of bits, Philox in 64-bit integers, filters in float64."""

from dataclasses import dataclass

import numpy as np

from jaxsoftmax._report import truth


def order(x) -> np.ndarray:
    """Returns integers in the order of `top_k`: the bits of floating numbers, turned around if the sign is set."""
    x = np.asarray(x)
    if x.dtype.kind in "iu":
        return x.astype(object) if x.dtype == np.uint64 else x.astype(np.int64)
    signed = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    return np.where(signed < 0, signed ^ (2 ** (8 * x.dtype.itemsize - 1) - 1), signed)


def least(dtype):
    """Returns the number that takes the place of a masked entry."""
    return np.iinfo(dtype).min if np.dtype(dtype).kind in "iu" else -np.inf


def top_k(x, k, axis=-1, where=None):
    """Returns the values and indices of `jax.lax.top_k`."""
    x = np.asarray(x)
    if where is not None:
        x, where = np.broadcast_arrays(x, where)
        x = np.where(where, x, np.asarray(least(x.dtype)).astype(x.dtype))
    indices = np.argsort(~order(x), axis, kind="stable")
    indices = np.take(indices, range(k), axis).astype(np.int32)
    return np.take_along_axis(x, indices, axis), indices


def philox(counter, key):
    """Computes Philox4x32-7 of words that are arrays or numbers, in integers of 64 bits."""
    c, k = [np.asarray(word, np.uint64) for word in counter], [int(word) for word in key]
    mask, half = np.uint64(2**32 - 1), np.uint64(32)
    for _ in range(7):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> half) ^ c[1] ^ np.uint64(k[0]),
            second & mask,
            (first >> half) ^ c[3] ^ np.uint64(k[1]),
            first & mask,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def gumbel(words) -> np.ndarray:
    """Computes the noise of random words, in float64."""
    return -np.log(-np.log1p(-(np.asarray(words, np.float64) + 0.5) / 2**32))


def noise(key, row, column) -> np.ndarray:
    """Computes the noise of columns of rows, for two words of a key."""
    column = np.asarray(column, np.uint64)
    block, place = column // 4096 * 512 + column % 512, column // 512 % 8
    upper, lower = (
        np.choose((place % 4).astype(int), philox((block + more, row, *key), (0, 0))) >> place // 4 * 16 for more in (0, 2**31)
    )
    return gumbel(upper % 2**16 * 2**16 + lower % 2**16)


@dataclass
class Filtered:
    """Rows of a distribution after the filters, in the order of the columns.

    Attributes:
      weights: weights of the softmax at the temperature; 0 for an entry that is not kept.
      doubtful: True for an entry that other roundings might keep or drop.
    """

    weights: np.ndarray
    doubtful: np.ndarray


def filtered(x, temperature=1.0, top_k=None, top_p=None, min_p=None, where=None, slack=1e-5) -> Filtered:
    """Filters rows along the last axis; the options are numbers or `[*batch]` arrays."""
    masked = x if where is None else np.where(where, x, np.asarray(-np.inf).astype(np.asarray(x).dtype))
    places = np.argsort(~order(masked), -1, kind="stable")
    scores = np.take_along_axis(truth.to64(masked), places, -1)
    n = scores.shape[-1]

    def of_rows(option):
        return np.broadcast_to(np.asarray(option, np.float64), scores.shape[:-1])[..., None]

    with np.errstate(invalid="ignore"):
        weights = np.exp((scores - scores[..., :1]) / of_rows(temperature))
    place, doubtful = np.arange(n), np.zeros(scores.shape, bool)
    kept = np.ones(scores.shape, bool)
    if top_k is not None:
        kept &= (place < of_rows(top_k)) | (of_rows(top_k) < 1)
    if top_p is not None:
        share = np.cumsum(np.where(kept, weights, 0), -1)
        share /= share[..., -1:]
        before = np.concatenate([np.zeros_like(share[..., :1]), share[..., :-1]], -1)
        all_of_it = of_rows(top_p) >= 1
        doubtful |= ~all_of_it & (np.abs(before - of_rows(top_p)) < slack)
        kept &= (before < of_rows(top_p)) | all_of_it
    if min_p is not None:
        doubtful |= (np.abs(weights - of_rows(min_p)) < slack) & (of_rows(min_p) > 0)
        kept &= weights >= of_rows(min_p)
    kept[..., 0], doubtful[..., 0] = True, False
    weights, back = np.where(kept, weights, 0), np.argsort(places, -1)
    return Filtered(np.take_along_axis(weights, back, -1), np.take_along_axis(doubtful, back, -1))
