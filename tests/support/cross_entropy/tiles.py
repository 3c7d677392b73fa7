"""Linear layers for kernels that multiply tiles of rows and classes: shapes, and operands that hurt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Rows, hidden size, classes and their axis: a tile, ragged ones, more tiles than blocks, and one row.
SHAPES = [(130, 192, 264, 0), (200, 128, 576, 1), (129, 72, 259, 1), (1, 64, 8, 0), (128, 64, 256, 1), (131, 100, 513, 0)]
LARGE = [
    *((4096 + 77, size, classes, axis) for size, classes, axis in [(64, 32000, 1), (768, 50257, 0), (4096, 128256, 1)]),
    *((rows, 1024, 50304, axis) for rows in (1, 64, 2048) for axis in (0, 1)),
]


def types(rows, size, classes, class_axis, dtype, weight_dtype=None):
    weight = (size, classes) if class_axis == 1 else (classes, size)
    return [
        jax.ShapeDtypeStruct((rows, size), dtype),
        jax.ShapeDtypeStruct(weight, weight_dtype or dtype),
        jax.ShapeDtypeStruct((rows,), np.int32),
    ]


def given(rows, size, classes, class_axis, dtype, factor=1.0):
    """Some rows have large scores; labels are the first and the last class, one beyond, a negative one, and any."""
    hidden, weight, labels = map(jnp.asarray, numbers(rows, size, classes, class_axis, dtype, factor))
    labels = np.array(labels)
    labels[1:5] = np.array([classes - 1, classes, -7, 0])[: len(labels[1:5])]
    return hidden, weight, labels


@functools.partial(jax.jit, static_argnums=range(6))
def numbers(rows, size, classes, class_axis, dtype, factor):
    hidden, weight, labels = types(rows, size, classes, class_axis, dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    factors = jnp.where(jnp.arange(rows) % 3 == 1, factor, 1)[:, None].astype(dtype)
    hidden = jax.random.normal(keys[0], hidden.shape, dtype) * factors
    weight = jax.random.normal(keys[1], weight.shape, dtype) * jnp.asarray(size**-0.5, dtype)
    return hidden, weight, jax.random.randint(keys[2], labels.shape, 0, classes)


def temperatures(rows):
    return np.linspace(0.4, 2.1, rows, dtype=np.float32)


# The bias and the cap of logits in tests.
LAYERS = {"bias": (True, None), "cap": (False, 5.0), "bias and cap": (True, 5.0)}
LEFT_OUT = -1e8  # a bias below leaves a class without weight, if there is no cap


def bias_of(classes, has_bias):
    """Some classes have no weight, and all of the second tile have none; None without a bias."""
    bias = np.random.default_rng(1).standard_normal(classes).astype(np.float32)
    bias[::5], bias[1::7], bias[3::11] = -np.inf, -1e9, np.finfo(np.float32).min
    bias[256:512] = -np.inf
    return bias if has_bias else None
