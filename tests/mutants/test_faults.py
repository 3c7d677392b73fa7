"""Tests that the faults of `python -m tests.mutants` fit the library as it is."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from . import __main__ as mutants
from .faults import EXEMPT, FAULTS

ROOT = mutants.ROOT
LEAST = 60  # of faults that tests without a GPU, and without Triton, can see


def modules() -> set[str]:
    """Returns the modules of the library that have code."""
    paths = [path for path in (ROOT / "jaxsoftmax").rglob("*.py") if path.stat().st_size]
    return {str(path.relative_to(ROOT)) for path in paths}


@pytest.fixture(scope="module")
def texts():
    return {path: (ROOT / path).read_text() for path in modules()}


def test_each_fault_is_in_one_line_and_compiles(texts):
    for fault in FAULTS:
        text = texts[fault.path]
        assert text.count(fault.before) == 1, fault.name
        assert "\n" not in fault.before + fault.after, fault.name
        assert fault.after != fault.before, fault.name
        # What is between two lines that start something at the margin is enough, and takes a tenth of the time.
        starts = [match.start() for match in re.finditer(r"^[\w@]", text, re.MULTILINE)] + [len(text)]
        at = text.index(fault.before)
        start, end = max(start for start in starts if start <= at), min(start for start in starts if start > at)
        ast.parse(text[start:end].replace(fault.before, fault.after))


def test_names_tell_faults_apart():
    assert not [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1]
    assert not [place for place, count in Counter((f.path, f.before, f.after) for f in FAULTS).items() if count > 1]


def test_every_module_has_a_fault():
    assert sum(not (fault.gpu or fault.triton) for fault in FAULTS) >= LEAST
    assert {fault.path for fault in FAULTS} == modules() - EXEMPT.keys()
    assert set(EXEMPT) <= modules()


def test_the_table_is_of_these_faults():
    lines = mutants.table(Path(__file__).with_name("caught.csv"))
    ran = {fault.name: fault for fault in FAULTS if not fault.gpu}
    assert set(lines) == set(ran)
    for name, line in lines.items():
        assert (line.path, line.before, line.after) == (ran[name].path, ran[name].before, ran[name].after), name
        assert line.outcome == "caught", name
