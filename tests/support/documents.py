"""Runs the code of documents and compares what it prints with what they show."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^(?:<!-- needs: ([^\n]+) -->\n+)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def assert_prints(document: str, *, by_section: bool = False) -> None:
    """Runs the Python blocks of a document in one namespace. A block that prints is followed by a `text` block of the output.

    With `by_section` each section, from one `##` to the next, sees only its own names and those from before the first `##`.

    The comment `<!-- needs: a b -->` before a Python block names packages. Where one is missing, the block does not run, and
    its output is not compared.
    """
    text = (ROOT / document).read_text()
    first, *rest = re.split(r"^(?=## )", text, flags=re.MULTILINE) if by_section else [text]
    assert BLOCK.search(text)
    namespace = {}
    _assert_prints(first, document, namespace)
    for section in rest:
        _assert_prints(section, document, dict(namespace))


def names(document: str, heading: str) -> dict:
    """Runs the Python blocks before the first section and those of one section, and returns the names that they define."""
    first, *rest = re.split(r"^(?=## )", (ROOT / document).read_text(), flags=re.MULTILINE)
    (section,) = [part for part in rest if part.startswith(f"## {heading}\n")]
    namespace = {}
    for part in (first, section):
        _assert_prints(part, document, namespace)
    return namespace


def _assert_prints(part: str, document: str, namespace: dict) -> None:
    printed = ""
    for needs, language, text in BLOCK.findall(part):
        if language == "python":
            assert not printed, f"{document} does not show {printed!r}"
            printed = None if any(map(is_missing, needs.split())) else output_of(text, document, namespace)
        elif language == "text":
            assert printed in (None, text)
            printed = ""
    assert not printed, f"{document} does not show {printed!r}"


def blocks(document: str) -> list[tuple[str, str, str]]:
    """Returns the blocks of a document: the packages that each needs, its language and its text."""
    return BLOCK.findall((ROOT / document).read_text())


def output_of(text: str, document: str, namespace: dict) -> str:
    """Runs a block and returns what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(text, document, "exec"), namespace)
    return output.getvalue()


def script(path: str) -> ModuleType:
    """Returns a Python file that is part of no package, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def headings(document: str) -> list[str]:
    """Returns the headings of a document, without those in code."""
    return re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.M | re.S), re.MULTILINE)


def anchor(heading: str) -> str:
    """Returns the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
