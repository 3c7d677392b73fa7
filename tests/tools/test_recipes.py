"""The recipes run, print what they show, and are all listed."""

import re
import tomllib

import jax
import pytest

from ..support import documents

FOLDER = documents.ROOT / "docs" / "recipes"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("page", PAGES)
def test_each_recipe_runs_behind_the_first_block_and_prints_what_it_shows(page):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        documents.assert_prints(f"docs/recipes/{page}.md", by_section=True)


@pytest.mark.parametrize("page", PAGES)
def test_a_recipe_is_a_question(page):
    title, *questions = documents.headings(f"docs/recipes/{page}.md")
    assert not title.endswith("?")
    assert questions
    assert all(question.endswith("?") for question in questions)


def test_the_index_lists_all_questions_in_their_order():
    text = (FOLDER / "index.md").read_text()
    listed = re.findall(r"^- \[(.*)\]\((\w+\.md)#(.*)\)$", text, re.MULTILINE)
    pages = re.findall(r"^## \[.*\]\((\w+)\.md\)$", text, re.MULTILINE)
    assert sorted(pages) == PAGES
    expected = [
        (question, f"{page}.md", documents.anchor(question))
        for page in pages
        for question in documents.headings(f"docs/recipes/{page}.md")[1:]
    ]
    assert listed == expected


def test_a_block_whose_package_is_missing_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROOT", tmp_path)

    def check(package, shown):
        needing = f"<!-- needs: {package} -->\n\n```python\nimport {package}\nprint(1)\n```\n```text\n{shown}\n```\n"
        other = "<!-- needs: pytest re -->\n\n```python\nprint(2)\n```\n```text\n2\n```\n"
        (tmp_path / "page.md").write_text(needing + other)
        documents.assert_prints("page.md")

    check("no_such_package", "1")
    check("pytest", "1")
    with pytest.raises(AssertionError):
        check("pytest", "3")


def test_what_recipes_need_is_installed_in_ci():
    group = tomllib.loads((documents.ROOT / "pyproject.toml").read_text())["dependency-groups"]["examples"]
    names = {re.split("[<>=]", line)[0].removeprefix("dm-") for line in group}
    needed = {name for page in PAGES for needs, *_ in documents.blocks(f"docs/recipes/{page}.md") for name in needs.split()}
    assert needed <= names
