"""Tests that links of documents, which GitHub follows, lead to the same places on the site."""

from pathlib import Path

import pytest

from ..support import documents

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/repository"


@pytest.fixture(scope="module")
def hooks():
    return documents.script("docs/hooks.py")


FIGURE = "benchmarks/results/h200/softmax_forward.svg"


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("flax.md", "support.md#attention", "support.md#attention"),
        ("recipes/index.md", "../flax.md", "../flax.md"),
        ("flax.md", f"../{FIGURE}", FIGURE),
        ("reference/softmax.md", f"../../{FIGURE}", f"../{FIGURE}"),
        ("flax.md", "../CONTRIBUTING.md#tests", "contributing.md#tests"),
        ("flax.md", "../README.md", "index.md"),
        ("contributing.md", "docs/design.md#accuracy", "design.md#accuracy"),
        ("contributing.md", "CHANGELOG.md", "changelog.md"),
        ("flax.md", "../examples/train_tiny_lm.py#L10", f"{REPOSITORY}/blob/main/examples/train_tiny_lm.py#L10"),
        ("gpus.md", "../benchmarks/results/h200", f"{REPOSITORY}/tree/main/benchmarks/results/h200"),
        ("gpus.md", "../../../issues", f"{REPOSITORY}/issues"),
        ("contributing.md", "../../issues", f"{REPOSITORY}/issues"),
        ("flax.md", "../is_not_there.py", "../is_not_there.py"),
        ("flax.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("flax.md", "#measured", "#measured"),
    ],
)
def test_a_link_leads_to_the_same_place_on_the_site(hooks, page, link, expected):
    text = "[a\nlink]({0}), a figure ![]({0}).\n\n```python\nx[0]({1})\n```\n"
    rewritten = hooks.rewritten(text.format(link, link), hooks.source_of(page), page, REPOSITORY)
    assert rewritten == text.format(expected, link)


def test_figures_that_a_page_shows_are_found(hooks):
    text = f"![](../{FIGURE}) [CSV](../benchmarks/results/h200/softmax.csv)\n"
    assert hooks.images(text, "docs/performance.md") == {FIGURE}


def test_pages_of_a_folder_have_the_order_of_its_index(hooks, monkeypatch, tmp_path):
    folder = tmp_path / "docs" / "recipes"
    folder.mkdir(parents=True)
    for name in ("a", "b", "c", "index"):
        (folder / f"{name}.md").write_text("[b](b.md#question) and [Flax](../flax.md), [a](a.md)")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    assert hooks.pages("recipes/") == [f"recipes/{name}.md" for name in ("index", "b", "a", "c")]
