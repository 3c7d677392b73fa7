"""Tables of implementations, dtypes, shapes, axes and hurtful inputs, over which the softmax family is tested."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxsoftmax import explain
from jaxsoftmax._core.choose import Explanation
from jaxsoftmax.ops import OPS as OPS_BY_NAME

OPS = ("softmax", "log_softmax", "logsumexp")
DTYPES = ("float32", "bfloat16", "float16")


def implementations(op: str) -> list:
    """Lists the implementations of an op as parameters. Those with kernels for CUDA have the mark `gpu`."""
    of_gpu = [name for name, kernels in OPS_BY_NAME[op].kernels.items() if "cuda" in kernels.platforms]
    names = OPS_BY_NAME[op].implementations
    return [pytest.param(name, marks=[pytest.mark.gpu] if name in of_gpu else []) for name in names]


IMPLEMENTATIONS = implementations("softmax")

SHAPES = [
    ((3, 1), -1),
    ((2, 127), -1),
    ((2, 128), -1),
    ((3, 129), -1),
    ((4, 1000), -1),
    ((2, 4097), -1),
    ((4097, 2), 0),
    ((3, 5, 7), (0, 2)),
    ((3, 5, 7), None),
    ((2, 3, 4, 5), 1),
    ((6,), 0),
    ((), ()),
    ((3, 4), ()),
    ((0, 5), -1),
    ((5, 0), -1),
]


def slow_unless(condition: bool):
    """Returns the marks of a case that runs by default only if the condition holds."""
    return [] if condition else [pytest.mark.slow]


def in_turns(period: int, *axes):
    """Returns the cases of several parameters, in the order of their product. One in `period` is not slow, in turns."""
    places = itertools.product(*map(enumerate, axes))
    return [
        pytest.param(*(value for _, value in case), marks=slow_unless(sum(i for i, _ in case) % period == 0)) for case in places
    ]


def every_other(values, first=0):
    """Returns the cases of a parameter. Every second one runs by default, from the one at `first` on; the others are slow."""
    return [pytest.param(value, marks=slow_unless(index % 2 == first)) for index, value in enumerate(values)]


def quick(*values, slow=()):
    """Returns the cases of a parameter. The slow ones repeat the others."""
    return [*values, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def pairwise(*lists) -> list[tuple]:
    """Returns the same few combinations of one value of each list, in which every pair of values of two lists occurs."""
    every = list(itertools.product(*(range(len(values)) for values in lists)))

    def pairs_of(combination):
        return set(itertools.combinations(enumerate(combination), 2))

    missing, chosen = set().union(*map(pairs_of, every)), []
    while missing:
        chosen.append(max(every, key=lambda combination: len(missing & pairs_of(combination))))
        missing -= pairs_of(chosen[-1])
    return [tuple(values[index] for values, index in zip(lists, each, strict=True)) for each in sorted(chosen)]


def crossed(op: str, *lists, by_turns: bool = False) -> list:
    """Returns cases of an implementation of `op` and a value of each list: all for kernels, the pairs for the reference.

    The reference runs with the combinations of `pairwise`. Its other cases are slow, as are those with a slow value (`quick`).
    With `by_turns` the reference runs by default with each value of each list, and not with each pair of values.
    """
    lists = [[value if hasattr(value, "marks") else pytest.param(value) for value in values] for values in lists]
    quick = [[index for index, value in enumerate(values) if not value.marks] for values in lists]
    few = [tuple(own[i % len(own)] for own in quick) for i in range(max(map(len, quick)))] if by_turns else pairwise(*quick)
    found = []
    for implementation in implementations(op):
        for indices in itertools.product(*map(range, map(len, lists))):
            values = [each[index] for each, index in zip(lists, indices, strict=True)]
            own = getattr(implementation, "marks", ())
            marks = [*own, *itertools.chain(*(value.marks for value in values))]
            marks += [] if own or marks else slow_unless(indices in few)
            names = itertools.chain(implementation.values, *(value.values for value in values))
            found.append(pytest.param(*names, marks=marks))
    return found


def ident(value) -> str:
    return str(value).replace(" ", "")


def inputs(shape, dtype, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns arrays by name that hurt an implementation in different ways, rounded to `dtype`."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    largest = float(ml_dtypes.finfo(jnp.dtype(dtype)).max)
    far = min(1e6, largest / 2)
    sparse = rng.random(shape) < 0.3
    beyond = np.zeros(shape, bool)  # the middle, along the last two axes
    for index, size in list(zip(np.indices(shape, sparse=True), shape, strict=True))[-2:]:
        beyond = beyond | (index >= size / 2)
    arrays = {
        "normal": normal,
        "wide": 30 * normal,
        "outliers": np.where(rng.random(shape) < 0.02, 1e3, normal),
        "offset of 1e4": 1e4 + normal,
        "offset of 1e6": far + normal * (far / 1e6),
        "equal": np.full(shape, 0.3),
        "some -inf": np.where(sparse, -np.inf, normal),
        "all -inf": np.full(shape, -np.inf),
        "one +inf": np.where(np.arange(normal.size).reshape(shape) == normal.size // 2, np.inf, normal),
        "one NaN": np.where(np.arange(normal.size).reshape(shape) == normal.size // 3, np.nan, normal),
        "-1e10 beyond the middle": np.where(beyond, max(-1e10, -largest), normal),
        "extremes": np.where(sparse, -largest, largest),
    }
    return {name: np.asarray(array, dtype=jnp.dtype(dtype)) for name, array in arrays.items()}


def several(platform: str) -> list[jax.Device]:
    """Returns the devices of a platform. Skips the test if there is only one."""
    devices = jax.devices(platform)
    if len(devices) < 2:
        pytest.skip(f"needs several devices, and JAX sees one of {platform}")
    return devices


def assert_ran(implementation: str, f, *args, without=()) -> None:
    """Fails unless every op in `f(*args)` runs on `implementation`. If that refuses, the test is skipped with its reason.

    Primitives in `without`, for which it has no kernel, run on the reference.
    """
    try:
        explanation = explain(f, *args)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    assert_all_run_on(implementation, explanation, without)


def assert_all_run_on(implementation: str, explanation: Explanation, without=()) -> None:
    """Fails unless there is an op and all run on `implementation`, except those in `without`, which run on the reference."""
    assert len(explanation) > 0, str(explanation)
    for decision in explanation:
        expected = "xla" if decision.primitive in without else implementation
        assert decision.implementation == expected, str(explanation)
