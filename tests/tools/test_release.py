"""A release: its checks, its packages' metadata, the workflows, the issue forms, and the commands that messages name."""

import importlib
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

import jaxsoftmax
from jaxsoftmax._triton import availability

from ..support import documents

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG, CITATION = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]

SOME_CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-01-02

### Added

- An op, [explained](docs/op.md#how) and [elsewhere](https://example.org).

## [1.1.0] - 2025-12-31

- Nothing new.

## [1.0.0] - 2025-12-30

[Unreleased]: https://example.org/compare
[1.2.0]: https://example.org/1.2.0
"""
SOME_CITATION = "title: t\nversion: 1.2.0\ndate-released: 2026-01-02\nlicense: l\n"


@pytest.fixture(scope="module")
def release():
    """The module `.ci/version.py`, which is part of no package."""
    return documents.script(".ci/version.py")


def parsed(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.mark.parametrize(
    ("version", "tag", "expected"),
    [
        ("1.2.0", None, []),
        ("1.2.0", "", []),
        ("1.2.0", "v1.2.0", []),
        ("1.2.0", "1.2.0", ["the tag is 1.2.0, but jaxsoftmax/__init__.py has version 1.2.0: expected v1.2.0"]),
        ("1.2.0", "v1.2", ["the tag is v1.2, but jaxsoftmax/__init__.py has version 1.2.0: expected v1.2.0"]),
        ("1.1.0", "v1.1.0", ["CITATION.cff does not have version 1.1.0 and date-released 2025-12-31, as CHANGELOG.md does"]),
        ("1.0.0", "v1.0.0", ["CHANGELOG.md says nothing about 1.0.0"]),
        ("1.3.0", "v1.3.0", ["CHANGELOG.md has no section '## [1.3.0] - YYYY-MM-DD'"]),
        ("1.2", "v1.2", ["CHANGELOG.md has no section '## [1.2] - YYYY-MM-DD'"]),
    ],
)
def test_a_release_is_refused_with_a_reason(release, version, tag, expected):
    assert release.problems_of(version, SOME_CHANGELOG, SOME_CITATION, tag) == expected


def test_the_notes_are_the_section_of_the_version(release):
    date, text = release.section_of(SOME_CHANGELOG, "1.2.0")
    assert date == "2026-01-02"
    assert text == "### Added\n\n- An op, [explained](docs/op.md#how) and [elsewhere](https://example.org).\n"
    assert release.section_of(SOME_CHANGELOG, "1.1.0") == ("2025-12-31", "- Nothing new.\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](S/blob/v1/docs/a.md#b)"),
        ("![a](docs/a.svg)", "![a](S/raw/v1/docs/a.svg)"),
        ("[![a](docs/a.svg)](docs/a.md)", "[![a](S/raw/v1/docs/a.svg)](S/blob/v1/docs/a.md)"),
        ("[a\nb](LICENSE)", "[a\nb](S/blob/v1/LICENSE)"),
        ("[a](https://example.org) [b](#c)", "[a](https://example.org) [b](#c)"),
        ("```python\nx[0](y)\n```\n[a](b)", "```python\nx[0](y)\n```\n[a](S/blob/v1/b)"),
    ],
)
def test_relative_links_become_absolute(release, text, expected):
    assert release.absolute_links(text, "S", "v1") == expected


def test_this_checkout_can_be_released(release, tmp_path, capsys):
    notes = tmp_path / "notes.md"
    assert release.main(["--tag", f"v{jaxsoftmax.__version__}", "--notes", str(notes)]) == 0
    assert PROJECT["urls"]["Source"] in notes.read_text()
    assert not re.findall(r"\]\((?!https?://|#)", notes.read_text())
    assert release.main(["--tag", "v0.0.0"]) == 1
    assert "the tag is v0.0.0" in capsys.readouterr().err


def test_ci_prepares_the_release_that_the_workflow_publishes():
    assert os.access(ROOT / ".ci" / "release", os.X_OK)
    assert "\n.ci/release " in (ROOT / ".ci" / "run").read_text()
    assert ".ci/release release " in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert set(PROJECT["dynamic"]) == {"readme", "version"}


def test_the_address_of_the_project_is_the_same_everywhere():
    urls = PROJECT["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert urls["Homepage"] == urls["Source"]
    assert urls["Issues"] == f"{urls['Source']}/issues"
    assert urls["Changelog"] == f"{urls['Source']}/blob/main/CHANGELOG.md"
    assert f"\nrepository-code: {urls['Source']}\nurl: {urls['Documentation']}\n" in CITATION
    assert f"[Documentation]({urls['Documentation']})" in (ROOT / "README.md").read_text()
    references = dict(re.findall(r"^\[(.+?)\]: (\S+)$", CHANGELOG, re.MULTILINE))
    versions = re.findall(r"^## \[(.+?)\]", CHANGELOG, re.MULTILINE)
    assert list(references) == versions
    assert references["Unreleased"] == f"{urls['Source']}/compare/v{jaxsoftmax.__version__}...HEAD"
    assert references[jaxsoftmax.__version__] == f"{urls['Source']}/releases/tag/v{jaxsoftmax.__version__}"


def test_no_other_file_has_the_address_of_the_project():
    hosts = [PROJECT["urls"][name].removeprefix("https://").rstrip("/") for name in ("Source", "Documentation")]
    paths = [
        path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".cff", ".yml", ".py") or path.name == "justfile"
    ]
    for folder in (".ci", ".github", "benchmarks", "docs", "examples", "jaxsoftmax", "tests"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in ("", ".md", ".yml", ".py") and path.is_file()]
    paths = [path for path in paths if ".ruff_cache" not in path.parts]  # docs/ has a ruff.toml, and so a cache
    found = {str(path.relative_to(ROOT)) for path in paths if any(host in path.read_text() for host in hosts)}
    assert found == {"pyproject.toml", "CITATION.cff", "CHANGELOG.md", "README.md"}


def test_the_entry_to_cite_is_the_newest_version():
    text = (ROOT / "docs" / "citing.md").read_text()
    date = re.search(r"^date-released: (\d+)", CITATION, re.MULTILINE)
    assert f"version = {{{jaxsoftmax.__version__}}}" in text
    assert f"year    = {{{date[1]}}}" in text
    entry = re.search(r"^@software.*?^}$", text, re.M | re.S)[0]
    assert f"```bibtex\n{entry}\n```" in (ROOT / "README.md").read_text()
    assert "arXiv:1805.02867" in text


def test_the_classifiers_are_the_pythons_that_workflows_test():
    classified = [line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", line)]
    weekly = (ROOT / ".github" / "workflows" / "weekly.yml").read_text()
    tested = [(ROOT / ".python-version").read_text().strip(), *re.findall(r'"python (3\.\d+)"', weekly)]
    assert classified == tested
    assert PROJECT["requires-python"] == f">={tested[0]}"
    cuda = {line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if "NVIDIA CUDA" in line}
    assert {f"cuda{version}" for version in cuda} == {name for name in PROJECT["optional-dependencies"] if "cuda" in name}
    # PyPI takes the licence from `license`, an SPDX expression, and metadata with both is refused by build backends.
    assert not [line for line in PROJECT["classifiers"] if line.startswith("License")]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_github_requires(path):
    workflow = parsed(path)
    assert workflow["name"] == path.stem
    assert workflow[True]  # `on`, which is a boolean in YAML 1.1
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file(), name
            continue
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job), name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), (name, step)
            for script in re.findall(r"(?<!\S)\.ci/\S+", step.get("run", "")):
                assert os.access(ROOT / script, os.X_OK), script


def test_workflows_pin_the_same_version_of_an_action():
    used = {match for path in WORKFLOWS for match in re.findall(r"uses: ([^\s@./][^\s@]*)@(\S+)", path.read_text())}
    assert len(used) == len(dict(used)) > 0, sorted(used)
    assert all(re.fullmatch(r"v\d+|release/v\d+", version) for _, version in used), sorted(used)


def test_the_weekly_tasks_exist():
    tasks = parsed(ROOT / ".github" / "workflows" / "weekly.yml")["jobs"]["task"]["strategy"]["matrix"]["task"]
    recipes = re.findall(r"^(\w[\w-]*)[^:\n]*:(?!=)", (ROOT / "justfile").read_text(), re.MULTILINE)
    assert {task.split()[0] for task in tasks} <= set(recipes)


def test_only_a_pushed_tag_publishes():
    workflow = parsed(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    for name, job in workflow["jobs"].items():
        assert ("permissions" in job) == (name in ("pypi", "github")), name
        assert name == "packages" or job["if"] == "github.event_name == 'push'", name
    jobs = workflow["jobs"]
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}
    assert jobs["pypi"]["environment"]["name"] == "pypi"
    assert set(jobs["pypi"]["needs"]) == {"tests", "packages"}
    assert jobs["github"]["needs"] == "pypi"
    # What a tag is called never becomes part of a script.
    assert not [step for job in jobs.values() for step in job.get("steps", ()) if "${{" in step.get("run", "")]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(path):
    form = parsed(path)
    assert all(isinstance(form[key], str) and form[key] for key in ("name", "description"))
    assert isinstance(form["labels"], list)
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for element in form["body"]:
        assert element["type"] in ("checkboxes", "dropdown", "input", "markdown", "textarea"), element
        assert element["attributes"]["label"], element
        assert set(element) <= {"type", "id", "attributes", "validations"}, element
        options = element["attributes"].get("options", [])
        assert all(isinstance(option, str) for option in options), options
        assert bool(options) == (element["type"] == "dropdown"), element
    assert any(element.get("validations", {}).get("required") for element in form["body"])


def test_the_issue_forms_ask_for_what_an_answer_needs():
    asked = {path.stem: path.read_text() for path in FORMS}
    assert set(asked) == {"bug", "feature", "performance"}
    assert "`python -m jaxsoftmax`" in asked["bug"]
    assert "`python -m jaxsoftmax --check`" in asked["bug"]
    assert "`python -m jaxsoftmax --bench`" in asked["performance"]
    assert all(word in asked["feature"] for word in ("`jax.nn`", "optax", "torch", "Shapes"))
    assert parsed(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": True}


def test_dependencies_are_updated_for_actions_and_for_the_lock():
    updates = parsed(ROOT / ".github" / "dependabot.yml")
    assert updates["version"] == 2
    assert {update["package-ecosystem"] for update in updates["updates"]} == {"github-actions", "uv"}
    assert all(update["directory"] == "/" and update["schedule"]["interval"] for update in updates["updates"])


def test_install_commands_in_messages_and_documents_have_the_bounds_of_the_extras():
    extras = PROJECT["optional-dependencies"]
    first, end = map(availability._dotted, availability._SERVED)
    assert extras["triton"] == [f"jax-triton>={first},<{end}"]
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "jaxsoftmax").rglob("*.py")]
    written = {
        (path.name, match)
        for path in paths
        for match in re.findall(r'"((?:flax|jax-triton)[<>=][\w.,<>=]+)"', path.read_text())
    }
    assert ("flax.py", extras["flax"][0]) in written
    assert {requirement for _, requirement in written} == {*extras["flax"], *extras["triton"]}


def test_no_message_or_document_installs_from_an_index_that_has_no_such_package():
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "jaxsoftmax").rglob("*.py")]
    assert not [path for path in paths if re.search(r"install ['\"]?jaxsoftmax\b", path.read_text())]


@pytest.mark.parametrize("module", ["flax", "flax.linen"])
def test_without_flax_the_error_names_the_command(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "jaxsoftmax.flax", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("jaxsoftmax.flax")
    assert str(raised.value) == 'jaxsoftmax.flax needs Flax, which is not installed: pip install "flax>=0.12.12"'


def test_a_module_that_flax_itself_lacks_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxsoftmax.flax", raising=False)
    monkeypatch.setattr("builtins.__import__", lacking("msgpack", of="flax"))
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'msgpack'$"):
        importlib.import_module("jaxsoftmax.flax")


def lacking(missing, of):
    """Returns an `__import__` that fails for modules of a package as if the package could not import `missing`."""
    original = importlib.__import__

    def imported(name, *arguments, **options):
        if name.partition(".")[0] == of:
            raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)
        return original(name, *arguments, **options)

    return imported
