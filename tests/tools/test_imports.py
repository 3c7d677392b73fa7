"""What files of tests import: of each other nothing, so that one can move, and be deleted, by itself."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = [path for path in TESTS.rglob("*.py") if path.name.startswith("test_") or path.name.endswith("_interpreted.py")]


def imported(path):
    """The modules below `tests` that a file imports, and names that it imports from one, as paths without a suffix."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = path.parents[node.level - 1]
            elif node.module.split(".")[0] == "tests":
                base = TESTS.parent
            else:
                continue
            base = base.joinpath(*(node.module or "").split(".")) if node.module else base
            yield from (base, *(base / alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (TESTS.parent.joinpath(*alias.name.split(".")) for alias in node.names)


def test_there_are_files_and_they_import_what_they_share():
    assert len(FILES) > 50
    assert any(TESTS / "support" in path.parents for file in FILES for path in imported(file))


def test_no_file_of_tests_is_imported():
    files = {file.with_suffix("") for file in FILES}
    found = {str(path.relative_to(TESTS)): files.intersection(imported(path)) for path in TESTS.rglob("*.py")}
    assert {path: others for path, others in found.items() if others} == {}
