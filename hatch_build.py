"""Makes the long description of the packages from README.md, with links that work outside of a checkout."""

import runpy
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Gives `project.readme`, in which relative links lead to the tag of this version."""

    def update(self, metadata: dict) -> None:
        root = Path(self.root)
        release = runpy.run_path(str(root / ".ci" / "version.py"))
        version = release["version_of"]((root / "jaxsoftmax" / "__init__.py").read_text())
        text = release["absolute_links"]((root / "README.md").read_text(), metadata["urls"]["Source"], f"v{version}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
