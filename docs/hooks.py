"""Hooks of MkDocs: the site's addresses, the pages of the repository's root, and links that leave `docs/`.

Documents link to files of the repository by relative paths, as GitHub follows them. On the site a link to a page of the root
leads to its copy, an image outside of `docs/` is copied, and any other link leads to the file on `main` in the repository.
A path that leaves the repository, such as `../../issues` at its root, leads to a page of GitHub beside the repository's files.
"""

import posixpath
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
SOURCES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
IMAGES = (".svg", ".png")

_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")


def on_config(config):
    """Reads the addresses of `[project.urls]`, and lists the pages of `docs/recipes`."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = urls["Documentation"], urls["Source"]
    config.repo_name = urls["Source"].removeprefix("https://github.com/")
    for entry in config.nav:
        for title, target in entry.items():
            if isinstance(target, str) and target.endswith("/"):
                entry[title] = pages(target)
            elif title == "Project":
                target.append({"Report a bug": urls["Issues"]})
    return config


def pages(folder: str) -> list[str]:
    """Returns the pages of a folder of `docs/`: its index, the pages in the order of the links there, then all others."""
    names = {path.name for path in (ROOT / "docs" / folder).glob("*.md")}
    linked = re.findall(r"\]\((\w+\.md)", (ROOT / "docs" / folder / "index.md").read_text())
    return [
        folder + name
        for name in dict.fromkeys(["index.md", *linked, *sorted(names)])
        if name in names
    ]


def on_files(files, config):
    """Adds the root's pages and the images that pages show."""
    from mkdocs.structure.files import File

    for page, source in SOURCES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for file in files.documentation_pages():
        text = Path(file.abs_src_path).read_text()
        for path in sorted(images(text, source_of(file.src_uri)) - set(files.src_uris)):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites links that leave `docs/`."""
    return rewritten(markdown, source_of(page.file.src_uri), page.file.src_uri, config.repo_url)


def on_page_content(html, **_):
    """Removes the space that mkdocstrings leaves after a parameter's default."""
    return re.sub(r"(?<=</code>)\s+(?=\)\s)", "", html)


def source_of(page: str) -> str:
    """Returns a page's path in the repository."""
    return SOURCES.get(page, f"docs/{page}")


def images(text: str, source: str) -> set[str]:
    """Finds the images outside of `docs/` that a document shows, as paths in the repository."""
    targets = {
        resolved(match[1], source)
        for prose in _FENCE.split(text)[::2]
        for match in _LINK.finditer(prose)
    }
    return {
        path
        for path in targets
        if path.endswith(IMAGES) and not path.startswith("docs/") and (ROOT / path).is_file()
    }


def rewritten(text: str, source: str, page: str, repository: str) -> str:
    """Returns the text of a document with the links that it has as a page of the site."""

    def link(match):
        path, anchor = resolved(match[1], source), match[2]
        if path in ROOT_PAGES:
            target = ROOT_PAGES[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif path.endswith(IMAGES):
            target = path
        elif path.startswith("../../"):  # GitHub shows a file of the root at `blob/main/`
            return repository + path.removeprefix("../..") + anchor
        elif (ROOT / path).exists():
            return (
                f"{repository}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{anchor}"
            )
        else:
            return match[0]  # MkDocs warns of it
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + anchor

    parts = _FENCE.split(text)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


def resolved(link: str, source: str) -> str:
    """Returns where a relative link of a document leads, as a path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
