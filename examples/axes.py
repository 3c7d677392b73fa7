"""Logarithmic axes with plain numbers."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator


def label_logarithmic(axes: Axes, places: Sequence[int]) -> None:
    """Labels an axis of these places, what was measured, and a logarithmic one of values: with 0.2 in place of 2 x 10^-1."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.xaxis.set_minor_locator(NullLocator())
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
