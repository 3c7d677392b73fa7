"""Labels and options of the losses, and functions of losses with their gradients."""

import functools

import jax
import numpy as np

import jaxsoftmax
from jaxsoftmax.ops.cross_entropy.loss import LossHead, Wanted

ALL = {"label_smoothing": 0.2, "z_loss": 0.05, "logits_soft_cap": 2.0}


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "cap": {"logits_soft_cap": 5.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "logits_soft_cap": 30.0, "ignore_index": 3},
}
FINITE = ("normal", "wide", "outliers", "offset of 1e4", "equal")


def labelled(shape, axis=-1, seed=1):
    """Returns labels of rows along an axis, with the first and the last class among them."""
    rng = np.random.default_rng(seed)
    n = shape[axis]
    labels = rng.integers(0, n, np.delete(shape, axis)).astype(np.int32)
    labels.flat[:2] = (0, n - 1)[: labels.size]
    return labels


def with_gradient(implementation=None, **options):
    """Returns losses, log-sum-exps, and the gradient for cotangents of the losses."""

    def run(x, labels, c):
        f = functools.partial(jaxsoftmax.cross_entropy, labels=labels, implementation=implementation, **options)
        loss, vjp = jax.vjp(f, x)
        return loss, f(x, return_lse=True)[1], vjp(c)[0]

    return jax.jit(run)


def without_ignored(options):
    return {name: value for name, value in options.items() if name != "ignore_index"}


def together(implementation=None, **options):
    """Returns losses and the gradient, from cotangents that are known with the logits, as in a linear layer's loss."""
    head = head_of(options, implementation)

    def run(logits, labels, factors):
        wanted = Wanted((("hidden",),), ())
        (losses, *_), (gradient,), _ = head.with_gradients([logits], {"labels": labels}, [factors], wanted, logits.dtype)
        return losses, gradient

    return jax.jit(run)


def head_of(options, implementation=None):
    """Returns the loss behind a linear layer with these options."""
    named = {"logits_dtype": None, "logits_soft_cap": None} | without_ignored(options)
    return LossHead((1,), **named, implementation=implementation, precision="default")


loss = jaxsoftmax.cross_entropy
