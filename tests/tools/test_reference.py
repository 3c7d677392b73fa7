"""The reference lists every public name once, and every docstring says what a reader of it needs."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import jax
import pytest

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
MODULES = ("jaxsoftmax", "jaxsoftmax.cache", "jaxsoftmax.flax", "jaxsoftmax.online", "jaxsoftmax.rl")
NAMES = sorted({f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__} | {*MODULES[1:]})
# A function that may refuse an argument: it raises itself, or calls what checks arguments.
CHECKS = re.compile(r"\braise\b|\barguments\.|\b_check|\b_real\(")


def public(name: str):
    """Returns the object of a public name such as `jaxsoftmax.online.merge`."""
    module, _, member = name.rpartition(".")
    return importlib.import_module(name) if name in MODULES else getattr(importlib.import_module(module), member)


FUNCTIONS = [name for name in NAMES if inspect.isfunction(public(name))]
CLASSES = [name for name in NAMES if inspect.isclass(public(name))]


def section(name: str, title: str) -> str:
    """Returns the text of a section of a docstring, "" if there is none."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n?|\n)*)", inspect.getdoc(public(name)) or "", re.MULTILINE)
    return found[1] if found else ""


def example(name: str) -> doctest.DocTest:
    """Returns the examples of a docstring, which import what they use."""
    return doctest.DocTestParser().get_doctest(inspect.getdoc(public(name)) or "", {}, name, None, 0)


def test_the_reference_has_one_entry_for_each_public_name():
    entries = [name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
    assert sorted(entries) == NAMES


def test_every_public_name_is_a_function_a_class_or_a_module():
    assert sorted({*FUNCTIONS, *CLASSES, *MODULES[1:]}) == NAMES


def test_the_list_of_the_reference_names_what_jaxsoftmax_exports():
    listed = re.findall(r"`([\w.]+)`", (REFERENCE / "index.md").read_text())
    missing = [name for name in NAMES if not name.startswith("jaxsoftmax.online.")]
    missing = [name for name in missing if name.removeprefix("jaxsoftmax.") not in listed and name not in MODULES]
    assert not missing


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_docstring_of_a_function_has_all_its_sections(name):
    function = public(name)
    if inspect.signature(function).parameters:
        documented = re.findall(r"^  (\**\w+):", section(name, "Args"), re.MULTILINE)
        assert [argument.lstrip("*") for argument in documented] == list(inspect.signature(function).parameters)
    assert section(name, "Returns")
    assert ">>>" in section(name, "Examples")
    assert section(name, "Raises") or not CHECKS.search(inspect.getsource(function))


@pytest.mark.parametrize("name", CLASSES)
def test_the_docstring_of_a_class_has_all_its_sections(name):
    assert section(name, "Attributes")
    assert ">>>" in section(name, "Examples")


@pytest.mark.parametrize("name", [name for name in NAMES if example(name).examples])
def test_the_examples_of_a_docstring_run_and_print_what_they_show(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        results = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(example(name))
    assert not results.failed
