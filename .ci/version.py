"""Checks that a release is consistent, and writes its notes.

usage: .ci/version.py [--tag TAG] [--notes FILE]

The version of `jaxsoftmax/__init__.py` must have a dated section in CHANGELOG.md, CITATION.cff must name the same version and
date, and a tag must be `v` and the version. The notes of a release are its section of the changelog. The status is 1 if
something disagrees. Needs Python's standard library alone; hatch_build.py loads this file too.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version_of(source: str) -> str:
    """Returns the version that a module assigns to `__version__`."""
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if match is None:
        raise ValueError("jaxsoftmax/__init__.py assigns no __version__")
    return match[1]


def section_of(changelog: str, version: str) -> tuple[str, str]:
    """Returns the date and the text of a version's section, without its heading and the link references at the end.

    Raises:
      ValueError: there is no section `## [version] - YYYY-MM-DD`, or nothing is in it.
    """
    match = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    if match is None:
        raise ValueError(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD'")
    text = re.sub(r"^\[[^\]]+\]: \S+\n?", "", match[2], flags=re.M).strip()
    if not text:
        raise ValueError(f"CHANGELOG.md says nothing about {version}")
    return match[1], text + "\n"


def absolute_links(markdown: str, source: str, tag: str) -> str:
    """Returns Markdown whose relative links lead to the files of a tag on GitHub.

    Pages that are not part of the repository need this, such as the one of the package on PyPI. Code blocks and links to a
    heading of the same page stay as they are.
    """

    def absolute(match: re.Match) -> str:
        kind = "raw" if match[1] else "blob"  # an image, or a page
        return f"{match[1] or ''}]({source}/{kind}/{tag}/{match[2]})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)  # text and code by turns
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(!\[[^\]]*)?\]\((?!https?://|mailto:|#)([^)\s]+)\)", absolute, parts[i])
    return "".join(parts)


def problems_of(version: str, changelog: str, citation: str, tag: str | None = None) -> list[str]:
    """Returns what is inconsistent about a release, one sentence each."""
    problems = []
    if tag and tag != f"v{version}":
        problems.append(f"the tag is {tag}, but jaxsoftmax/__init__.py has version {version}: expected v{version}")
    try:
        date, _ = section_of(changelog, version)
    except ValueError as error:
        return [*problems, str(error)]
    if f"\nversion: {version}\ndate-released: {date}\n" not in citation:
        problems.append(f"CITATION.cff does not have version {version} and date-released {date}, as CHANGELOG.md does")
    return problems


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks on this checkout. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Checks that a release is consistent, and writes its notes.")
    parser.add_argument("--tag", help="the tag that is released; an empty one is not checked")
    parser.add_argument("--notes", type=Path, help="a file that the notes are written to")
    options = parser.parse_args(arguments)
    version = version_of((ROOT / "jaxsoftmax" / "__init__.py").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if problems := problems_of(version, changelog, (ROOT / "CITATION.cff").read_text(), options.tag):
        print("\n".join(problems), file=sys.stderr)
        return 1
    date, notes = section_of(changelog, version)
    if options.notes:
        urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
        options.notes.write_text(absolute_links(notes, urls["Source"], f"v{version}"))
    print(f"version {version} of {date}: tag, changelog and citation agree" if options.tag else f"version {version} of {date}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
