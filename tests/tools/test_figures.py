"""The figures of the result files: they are drawn from the files as they are, and every word of them can be read."""

import dataclasses
import itertools
import re

import matplotlib as mpl
import matplotlib.text
import numpy as np
import pytest

from benchmarks import figures, plot, results
from examples.worklog import figures as worklog
from examples.worklog.measured import Measured

from ..support import cases

H200 = results.FOLDER / "h200"
FILES = sorted(path for path in results.FOLDER.glob("*/*.csv") if path.stem in figures.SUITES)


def names_of(path):
    return f"{path.parent.name} {path.stem}"


def drawn(path):
    """The figures of a result file, by the names of their files."""
    rows = results.read(path)
    return dict((figures.figures_of_sweep if path.stem == "softmax_sweep" else figures.figures)(rows))


def assert_can_be_read(figure, monkeypatch):
    """No two texts of a figure overlap, and none is cut off."""
    texts = []
    with monkeypatch.context() as patch:
        patch.setattr(matplotlib.text.Text, "draw", lambda text, renderer: texts.append(text))  # of those that are drawn
        figure.draw_without_rendering()
    boxes = [(text.get_text(), matplotlib.text.Text.get_window_extent(text)) for text in texts if text.get_visible()]
    boxes = [(text, box) for text, box in boxes if text.strip()]
    assert len(boxes) > 10
    for text, box in boxes:
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) > -0.5, f"{text!r} is cut off"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, down) < 1, f"{one!r} overlaps {other!r}"


ONE_OF_EACH = list({path.stem: path for path in FILES}.values())


@pytest.mark.parametrize(
    "path", cases.quick(*ONE_OF_EACH, slow=[path for path in FILES if path not in ONE_OF_EACH]), ids=names_of
)
def test_words_of_figures_do_not_overlap(path, monkeypatch):
    with mpl.rc_context(plot.STYLE):
        for figure in drawn(path).values():
            assert_can_be_read(figure, monkeypatch)


def test_words_of_the_worklogs_figures_do_not_overlap(monkeypatch):
    measured = Measured.read(H200)
    with mpl.rc_context(plot.STYLE):
        for figure in (worklog._times(measured), worklog._roofline(measured)):
            assert_can_be_read(figure, monkeypatch)


def assert_is_kept(path, kept):
    """The file is small, and shows what the one that is kept beside the results shows, if the same matplotlib drew both."""
    new, old = (re.sub(r"(#|id=\")[mp][0-9a-f]{10}", "", file.read_text()) for file in (path, kept))
    assert len(new) < 100_000
    if f"Matplotlib v{mpl.__version__}," in old:
        number = re.compile(r"-?\d+(?:\.\d+)?")
        assert number.sub("", new) == number.sub("", old), f"draw {kept.name} anew"
        near = np.allclose([float(x) for x in number.findall(new)], [float(x) for x in number.findall(old)], rtol=0, atol=0.1)
        assert near, f"draw {kept.name} anew"


@pytest.mark.parametrize("path", FILES, ids=names_of)
def test_figures_are_those_of_their_result_files(path, tmp_path):
    for new in figures.draw(results.read(path), tmp_path, sweep=path.stem == "softmax_sweep"):
        assert_is_kept(new, path.with_name(new.name))


def test_figures_of_the_worklog_are_those_of_its_result_files(tmp_path):
    for new in worklog.draw(Measured.read(H200), tmp_path):
        assert_is_kept(new, H200 / new.name)


def test_figures_have_a_background_and_text_that_stays_text_and_the_same_bytes_each_time(tmp_path):
    rows = results.read(H200 / "decoding.csv")
    (path,) = figures.draw(rows, tmp_path)
    text = path.read_text()
    assert figures.draw(rows, tmp_path) == [path]
    assert path.read_text() == text
    assert 'style="fill: #ffffff"' in text
    assert ">jaxsoftmax</text>" in text


def test_a_peer_of_an_earlier_run_has_a_star_and_a_run_without_peers_no_figure(tmp_path):
    rows = [row for row in results.read(H200 / "decoding.csv") if row.op == "decoding"]
    again = [dataclasses.replace(row, run="later", us=row.us / 2) for row in rows if row.implementation == "mosaic"]
    (path,) = figures.draw([*rows, *again], tmp_path)
    text = path.read_text()
    assert ">jax.nn (XLA) *</text>" in text
    assert "* measured in an earlier run." in text
    assert f">1.93{plot.TIMES}</text>" in text  # twice 0.96, of one sequence
    assert figures.draw(again, tmp_path) == []


def test_ratios_are_of_the_best_alternative_at_sizes_that_both_have():
    values = {plot.OURS: {1: 10.0, 2: 10.0, 4: 10.0}, "torch": {1: 5.0, 2: 20.0}, "cudnn": {1: 8.0}}
    assert plot.ratios_of(values, max) == {1: 1.25, 2: 0.5}
    assert plot.ratios_of(values, min) == {1: 0.5, 2: 2.0}
