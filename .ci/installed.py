"""Calls the installed package of an environment that has no checkout; the file that it was installed from is an argument."""

import importlib.metadata
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jaxsoftmax

package, folder = Path(sys.argv[1]), Path(jaxsoftmax.__file__).parent
if package.suffix == ".whl":
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"jaxsoftmax", f"jaxsoftmax-{jaxsoftmax.__version__}.dist-info"}, names
    assert "jaxsoftmax/py.typed" in names, names
else:
    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert not [name for name in names if "tests/" in name or "benchmarks/" in name], names
assert folder.is_relative_to(sys.prefix), folder
assert package.stat().st_size < 2**20, package.stat().st_size
description = importlib.metadata.metadata("jaxsoftmax").get_payload()
assert "## Install" in description, description
assert not (relative := re.findall(r"\]\((?!https?://|#)\S+\)", description)), relative

x = jnp.asarray([[1.0, 2.0, 3.0], [0.0, 0.0, -jnp.inf]])
np.testing.assert_allclose(jaxsoftmax.softmax(x), [[0.09003057, 0.24472847, 0.66524096], [0.5, 0.5, 0.0]], rtol=1e-6)
explanation = jaxsoftmax.explain(jaxsoftmax.softmax, jnp.ones((8, 1024)), platform="cuda")
assert [decision.implementation for decision in explanation] == ["mosaic"], str(explanation)
print(f"{package.name}, {package.stat().st_size // 1024} KiB, {len(names)} files: softmax and explain run\n{explanation}")
