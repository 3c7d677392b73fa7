"""Compares the documents with the code: the support matrix, the code and its output, links, versions."""

import functools
import inspect
import itertools
import posixpath
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import cache, explain
from jaxsoftmax._core import choose, lower
from jaxsoftmax.ops import OPS as FAMILIES

from ..support import cases, documents, kernels

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SUPPORT = (ROOT / "docs/support.md").read_text()
MOST_WORDS = 900
HEADER = "| implementation | op | platforms | dtypes |"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
NO_OPS = {
    "BlockMask",
    "ContextParallel",
    "Decision",
    "Explanation",
    "block_mask",
    "cache",
    "explain",
    "online",
    "rl",
    "unzigzag",
    "zigzag",
}
OPS = {*jaxsoftmax.__all__, "paged_attention"} - NO_OPS
SHAPE = (16, 1024)  # one that every implementation takes
ATTENTION_SHAPE = (2, 256, 8, 64)


def support_matrix() -> list[tuple[str, str, list[str], list[str]]]:
    """Returns the rows of the table of docs/support.md: implementation, op, platforms, dtypes."""
    _, _, table = SUPPORT.partition(HEADER + "\n")
    rows = []
    for line in table.splitlines()[1:]:  # after the line of dashes
        if not line.startswith("|"):
            break
        implementation, op, platforms, dtypes = (cell.split() for cell in line.strip("|").split("|"))
        rows.append((implementation[0], op[0], platforms, dtypes))
    return rows


ROWS = support_matrix()
DOCUMENTS = (  # those with code; the recipes have tests of their own
    "decoding",
    "design",
    "differences",
    "flax",
    "getting_started",
    "index",
    "memory",
    "numerics",
    "scaling",
    "support",
)
DTYPES = sorted({dtype for *_, dtypes in ROWS for dtype in dtypes})


def folder(op: str) -> str:
    """Returns the folder of a public function: `softmax` for `logsumexp`."""
    return "attention" if op in cache.__all__ else Path(inspect.getfile(getattr(jaxsoftmax, op))).parent.name


def shape(op: str) -> tuple[int, ...]:
    """Returns the shape of the operands of a public function."""
    return ATTENTION_SHAPE if folder(op) == "attention" else SHAPE


def call(op: str, x, **options):
    """Calls a public function with one array and labels, or with the same array for every operand."""
    labels = jnp.zeros(x.shape[:1], jnp.int32)
    others = {"dot_product_attention": [x, x], "cross_entropy": [labels], "linear_cross_entropy": [x, labels]}
    others |= {
        "linear_divergence": [x, x, x],
        "log_probs": [labels],
        "kl_divergence": [x],
        "js_divergence": [x],
        "linear_log_probs": [x, labels],
    }
    others["paged_attention"] = [x, x, labels[:, None], labels + x.shape[1]]  # a page of as many keys
    others |= {"top_k": [4], "softmax_top_k": [4]}
    if op == "categorical":
        return jaxsoftmax.categorical(jax.random.key(0), x, **options)
    if op.startswith("linear"):
        options |= {"class_axis": 0} | ({} if op == "linear_log_probs" else {"reduction": "none"})
        options.pop("axis", None)
    function = getattr(cache if op in cache.__all__ else jaxsoftmax, op)
    result = function(x, *others.get(op, []), **options)
    return result[0] if op.endswith("top_k") else result


# The primitives that public functions of other names run.
RUN = dict.fromkeys(("log_probs", "entropy"), "cross_entropy")
RUN |= {"linear_cross_entropy": "linear_log_probs", "linear_divergence": "kl_divergence"}


@pytest.fixture
def chosen_alone(monkeypatch):
    """Chooses implementations and runs none: results are zeros. Only operations that consist of another op run."""
    run = lower.Runner.run

    def recorded(self, choice, operands):
        operation, params = choice.problem.operation, choice.problem.params
        if operation.name.startswith("linear"):
            return run(self, choice, operands)
        choose.record(choice)
        return [jnp.zeros(kind.shape, kind.dtype) for kind in operation.types(operands, **params)]

    monkeypatch.setattr(lower.Runner, "run", recorded)
    with kernels.anew():
        yield


@pytest.fixture
def no_triton():
    with kernels.without_triton():
        yield


# What runs on several platforms, and what is refused, with every second dtype on each, in turn; or with every dtype on each.
@pytest.mark.parametrize("step", cases.quick(2, slow=[1]))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
@pytest.mark.usefixtures("x64", "no_triton", "chosen_alone")
def test_the_support_matrix_is_what_dispatch_says(row, step):
    name, op, platforms, dtypes = row
    assert set(platforms) <= set(PLATFORMS)

    def forced(x):
        return call(op, x, implementation=name)

    for i, platform in enumerate(PLATFORMS):
        for j, dtype in enumerate(DTYPES):
            x = jax.ShapeDtypeStruct(shape(op), dtype)
            served = platform in platforms and dtype in dtypes
            if (len(platforms) > 1 or not served) and (i + j) % step:
                continue
            if served:
                decisions = explain(forced, x, platform=platform)
                *outer, (primitive, chosen) = [(d.primitive, d.implementation) for d in decisions]
                assert chosen == name, (platform, dtype)
                if outer:  # XLA makes the products, and what is computed of them runs as it says
                    assert op.startswith("linear"), (platform, dtype)
                    assert (outer, primitive) == ([(RUN.get(op, op), "xla")], "cross_entropy"), (platform, dtype)
                else:
                    assert primitive == RUN.get(op, op), (platform, dtype)
            else:
                with pytest.raises((TypeError, NotImplementedError), match=f"{op}|{folder(op)}|{RUN.get(op, op)}"):
                    explain(forced, x, platform=platform)


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] == "xla"], ids=lambda row: row[1])
@pytest.mark.usefixtures("x64")
def test_every_dtype_of_the_support_matrix_runs(row):
    _, op, _, dtypes = row
    options = {} if folder(op) == "attention" else {"axis": -1}

    @jax.jit
    def results(operands):
        return {dtype: call(op, x, **options) for dtype, x in operands.items()}

    operands = {dtype: np.ones(shape(op), jnp.dtype(dtype)) for dtype in dtypes}
    by_dtype = results(operands)
    for dtype, x in operands.items():
        y = by_dtype[dtype]
        of_rows = op.endswith(("logsumexp", "cross_entropy", "log_probs", "entropy", "divergence", "categorical"))
        assert y.shape == (SHAPE[:1] if of_rows else (*SHAPE[:1], 4) if folder(op) == "top_k" else x.shape), dtype
        inexact = jnp.issubdtype(dtype, jnp.inexact) and folder(op) not in ("cross_entropy", "divergence")
        floating = x.dtype if inexact or op == "top_k" else jnp.float64 if x.dtype.itemsize == 8 else jnp.float32
        assert y.dtype == (jnp.int32 if op == "categorical" else floating), dtype
        assert np.isfinite(np.asarray(y).astype(np.complex64)).all(), dtype


def behind_elementwise_operations():
    """Returns the rows of the table for operands that XLA fuses: the calls, and what runs by dtype."""
    _, _, table = SUPPORT.partition("| behind elementwise operations | float32 | bfloat16, float16 |\n|---|---|---|\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.partition("\n\n")[0].splitlines()]
    return [(calls, {"float32": wide, "bfloat16": narrow, "float16": narrow}) for calls, wide, narrow in rows]


ELEMENTWISE = behind_elementwise_operations()


def calls_of(words):
    """Returns the calls that a row of that table means, as functions of an operand."""
    if words.startswith("their derivatives"):
        ops = [*cases.OPS, "cross_entropy"]
        return [lambda x, op=op: jax.grad(lambda x: jnp.sum(jnp.sin(call(op, x).astype(jnp.float32))))(x) for op in ops]
    if words.startswith("`categorical` with"):
        options = ({"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1})
        return [lambda x, option=option: call("categorical", x, **option) for option in options]
    if words == "`top_k` with `k=1`":
        return [lambda x: jaxsoftmax.top_k(x, 1)[0]]
    return [functools.partial(call, op) for op in re.findall(r"`(\w+)`", words) if op in OPS]


@pytest.mark.usefixtures("chosen_alone")
@pytest.mark.parametrize("row", ELEMENTWISE, ids=lambda row: row[0])
def test_what_runs_behind_elementwise_operations_is_what_explain_says(row):
    words, stated = row
    for f, (dtype, runs) in itertools.product(calls_of(words), stated.items()):
        is_attention = isinstance(f, functools.partial) and folder(f.args[0]) == "attention"
        shapes = {ATTENTION_SHAPE: runs} if is_attention else {(64, 1024): runs, (64, 2**18): runs}
        if most := re.fullmatch(r"kernel above (\d+) columns", runs):
            shapes = {(64, int(most[1])): "reference", (64, int(most[1]) + 1): "kernel", (64, 2**18): "kernel"}
        for shape, expected in shapes.items():
            fused = explain(lambda x, f=f: f(x * jnp.asarray(2, x.dtype) + 1), jax.ShapeDtypeStruct(shape, dtype), gpu="h100")
            assert {"mosaic": "kernel", "xla": "reference"}[fused[-1].implementation] == expected, (dtype, shape)


def test_every_op_has_a_row_of_what_runs_behind_elementwise_operations():
    named = {name for words, _ in ELEMENTWISE for name in re.findall(r"`(\w+)`", words)}
    assert named >= OPS


def test_the_support_matrix_lists_every_implementation_and_op_once():
    expected = [(name, op) for op in OPS for name in FAMILIES[folder(op)].implementations]
    expected.remove(("triton", "entropy"))  # which has no kernel for entropies
    assert sorted((name, op) for name, op, *_ in ROWS) == sorted(expected)


@pytest.mark.parametrize("op", FAMILIES)
def test_a_file_or_folder_of_an_op_is_named_for_each_implementation(op):
    stems = {path.stem for path in (ROOT / "jaxsoftmax" / "ops" / op).iterdir()}
    assert {stem.partition("_sm")[0] for stem in stems} & {"mosaic", "triton", "xla"} == set(FAMILIES[op].implementations)


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{name}.md" for name in DOCUMENTS)])
def test_the_code_of_the_documents_runs_and_prints_what_they_show(document):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have it
        documents.assert_prints(document)


@pytest.mark.parametrize("command", ["uv run examples/train_tiny_lm.py", "uv run pytest -n auto"])
def test_the_two_commands(command):
    assert f"    pip install uv && {command}\n" in README
    script = command.split()[2]
    assert script == "pytest" or (ROOT / script).is_file()


def test_the_readme_is_short_and_says_what_a_newcomer_asks():
    assert len(README.split()) <= MOST_WORDS
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == ["Install", "The swap", "What you get", "GPUs", "Limits", "Links"]
    devices = README.partition("## GPUs")[2].partition("## ")[0]
    assert all(name in devices for name in ("Hopper", "A100", "L4", "RTX", "B200", "TPU", "AMD"))
    assert len(re.findall(r"!\[.*\]\(benchmarks/results/.*\.svg\)", README)) == 1
    gained = README.partition("## What you get")[2].partition("## ")[0]
    functions = OPS | {"online", "attention_fn"}
    assert {name for name in functions if name not in gained} == set()


def test_the_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cuda12", "cuda13"} <= set(extras)
    assert "uv run --extra cuda13 " in README


def test_links_between_documents_lead_somewhere():
    for here in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        document = here.relative_to(ROOT)
        for link in re.findall(r"\]\(([^)]+)\)", here.read_text()):
            path, _, anchor = link.partition("#")
            outside = posixpath.normpath(posixpath.join(document.parent.as_posix(), path))
            if link.startswith("https://") or outside.startswith(("../../actions/", "../../issues")):  # pages of GitHub
                continue
            target = (here.parent / path) if path else here
            assert target.exists(), (document, link)
            anchors = [documents.anchor(heading) for heading in documents.headings(target)] if anchor else []
            assert not anchor or anchor in anchors, (document, link)


def test_the_paths_in_the_design_exist():
    text = re.sub(r"^```python.*?^```", "", (ROOT / "docs/design.md").read_text(), flags=re.M | re.S)
    paths = set(re.findall(r"(?<![\w/>])[a-z_]\w*(?:/\w+)*/(?:\w+\.py)?(?![\w<{])", text)) - {"ops/"}
    assert len(paths) > 30
    assert not [path for path in paths if not any((ROOT / top / path).exists() for top in ("jaxsoftmax", "."))]


@pytest.mark.parametrize("folder", [".", "docs", "docs/notes", "docs/recipes", "docs/reference"])
def test_no_line_is_a_list_by_mistake(folder):
    """A line that starts with a number and a period is an entry of a list, and a number that ends a sentence vanishes."""
    for path in (ROOT / folder).glob("*.md"):
        assert not re.search(r"^ *\d{3,}\. ", path.read_text(), re.MULTILINE), path


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "jaxsoftmax/__init__.py"
    unreleased, newest, *_ = re.findall(r"^## \[(.+?)\](?: - (.*))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert unreleased == ("Unreleased", "")
    version, date = newest
    assert version == jaxsoftmax.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation
    assert "arXiv:1805.02867" in citation


def test_installing_the_checkout_asks_for_no_version_of_jax_but_the_oldest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not {name for name in project["tool"]["uv"] if name.endswith(("constraint-dependencies", "override-dependencies"))}
    asked = [*project["project"]["dependencies"], *itertools.chain(*project["project"]["optional-dependencies"].values())]
    assert {re.sub(r"\[.*\]", "", one) for one in asked if re.match(r"jax\W", one) and "triton" not in one} == {"jax>=0.11.2"}
    pins = dict(one.split("==") for one in project["dependency-groups"]["dev"] if "==" in one)
    locked = {package["name"]: package.get("version") for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    assert pins == {name: locked[name] for name in ("jax", "jaxlib")}
