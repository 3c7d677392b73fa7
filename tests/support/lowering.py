"""Replaces slow functions of Mosaic, so that tests lower kernels to the same programs in less time."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from jax.experimental.mosaic.gpu import constraints, layouts
from jax.experimental.mosaic.gpu import fragmented_array as fa

from . import kernels


def equal_variables(system: constraints.ConstraintSystem) -> dict[constraints.Variable, list[constraints.Variable]]:
    """Lists the variables that each variable equals, directly or through others, in the order of the constraints.

    Mosaic sorts them by the printed text of their operations, regions included, which takes a fifth of the time of a kernel.
    """
    groups: dict[constraints.Variable, dict[constraints.Variable, None]] = {}
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=constraints.Variable() as left, rhs=constraints.Variable() as right):
                one, other = (groups.setdefault(each, {each: None}) for each in (left, right))
                if one is not other:
                    one.update(other)
                    groups.update(dict.fromkeys(other, one))
    return {variable: [other for other in group if other != variable] for variable, group in groups.items()}


def by_text(function):
    """Caches a function of an MLIR attribute by the attribute's text, as the attribute does not outlive its context."""
    found = {}

    @functools.wraps(function)
    def remembered(attribute):
        text = str(attribute)
        if text not in found:
            found[text] = function(attribute)
        return found[text]

    return remembered


# What takes the place of functions of Mosaic, those of them that it has.
REPLACEMENTS = [
    (constraints, "compute_transitively_equal_vars", lambda function: equal_variables),
    (layouts, "_from_tiled_layout_attr", by_text),
    (fa.TiledLayout, "canonicalize", functools.cache),
]
ORIGINALS = [(place, name, getattr(place, name)) for place, name, _ in REPLACEMENTS if hasattr(place, name)]


def quickly() -> None:
    """Makes Mosaic lower kernels in three quarters of the time."""
    for place, name, replaced in REPLACEMENTS:
        if hasattr(place, name):
            setattr(place, name, replaced(getattr(place, name)))


@contextlib.contextmanager
def as_users_lower() -> Iterator[None]:
    """Puts the original functions of Mosaic back inside the context."""
    with contextlib.ExitStack() as patches:
        for place, name, function in ORIGINALS:
            patches.enter_context(mock.patch.object(place, name, function))
        patches.enter_context(kernels.anew())
        yield
