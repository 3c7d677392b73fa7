"""The cells of cross-entropy from integer labels: the losses of 8192 tokens, and the losses with the gradient of their mean.

`bytes` are those of the logits, which forward reads once; backward reads them once more, and writes as many. Those of labels
and losses are not counted. The gradient is that of the mean, which is itself no output: it belongs to what reads the losses.
Peers of torch, whose forward pass returns the mean, give the gradient alone; cells of the forward pass check their losses.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import to_torch
from benchmarks.softmax import DTYPES, ELEMENTS, copy_cell, one_array, sums, torch_contender
from tests.support.cross_entropy import oracle

ROWS = 8192
VOCABULARIES = (256000, 151936, 128256, 128003, 50257)  # the largest first: smaller arrays fit into the memory that they had
SMALL = 32000
WITH_OPTIONS = 128256
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "logits_soft_cap": 30.0}

_PEERS_OF_TORCH = {
    "torch": ("torch.nn.functional", "cross_entropy"),
    "quack": ("quack.cross_entropy", "cross_entropy"),
    "liger": ("liger_kernel.transformers.functional", "liger_cross_entropy"),
}
_NAMES_OF_LIGER = {"label_smoothing": "label_smoothing", "z_loss": "lse_square_scale", "logits_soft_cap": "softcap"}


def cells(rows: int = ROWS) -> list[Cell]:
    """All cells: copies, with which the others are compared, both passes, and backward with each option and with all."""
    chosen = [*({name: value} for name, value in OPTIONS.items()), OPTIONS]
    return [
        *(copy_cell(dtype, ELEMENTS // ROWS * rows) for dtype in DTYPES),
        *(cell_of(dtype, (rows, cols)) for dtype in DTYPES for cols in VOCABULARIES),
        *(cell_of(dtype, (rows, cols), backward=True) for dtype in DTYPES for cols in (*VOCABULARIES, SMALL)),
        *(cell_of("bfloat16", (rows, WITH_OPTIONS), backward=True, **options) for options in chosen),
    ]


def cell_of(dtype: str, shape: tuple[int, int], backward: bool = False, **options: float) -> Cell:
    rows, cols = shape

    def inputs(key, hurtful):
        labels = jax.random.randint(jax.random.fold_in(key, 3), (rows,), 0, cols)
        return *one_array(shape, dtype)(key, hurtful), labels

    def truth(x, labels):
        losses = oracle.cross_entropy(x, labels, **options)
        return [losses.loss, losses.gradient(np.full(labels.shape, 1 / rows))] if backward else [losses.loss]

    def of_jax(loss):
        def both(x, labels):
            losses, vjp = jax.vjp(lambda x: loss(x, labels), x)
            return losses, vjp(jnp.full_like(losses, 1 / rows))[0]

        return both if backward else loss

    def of_torch(name, **renamed):
        module, function = _PEERS_OF_TORCH[name]

        def build():
            loss = functools.partial(getattr(importlib.import_module(module), function), **renamed)
            if not backward:
                return functools.partial(loss, reduction="none")
            return lambda x, labels: torch().autograd.grad(loss(x, labels), x)

        def prepare(x, labels):
            x, labels = to_torch(x, labels)
            x = x.clone() if name == "liger" else x  # which writes the gradient over it
            return x.requires_grad_(backward), labels.long()

        needs = module.split(".")[0], "torch"
        return torch_contender(name, build, prepare=prepare, needs=needs, truth=lambda x, labels: truth(x, labels)[-1:])

    ours = Contender(OURS, lambda: of_jax(functools.partial(library.cross_entropy, **options)))
    if options:
        peers = [of_torch("liger", **{_NAMES_OF_LIGER[name]: value for name, value in options.items()})]
    else:
        peers = [
            Contender(
                "optax",
                lambda: of_jax(importlib.import_module("optax").softmax_cross_entropy_with_integer_labels),
                needs=("optax",),
            ),
            *map(of_torch, _PEERS_OF_TORCH),
        ]
    return Cell(
        "cross_entropy",
        "forward+backward" if backward else "forward",
        dtype,
        shape,
        " ".join(f"{name}={value:g}" for name, value in sorted(options.items())),
        (3 if backward else 1) * math.prod(shape) * jnp.dtype(dtype).itemsize,
        inputs,
        (ours, *peers, *(() if backward else sums())),
        truth,
    )
