"""The example that generates: the ways give the same tokens, speeds and plot come out, and what cannot be used is said."""

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

SCRIPT = Path(__file__).parents[2] / "examples" / "generate.py"
SMALL = {"lengths": "9,12", "layers": 2, "width": 32, "heads": 4, "kv-heads": 2, "tokens": 4, "batch": 3, "only": "jax,flash"}

pytestmark = pytest.mark.usefixtures("standard_promotion_all", "compiled_quickly_all")  # Flax promotes


def arguments(out, **changes):
    options = SMALL | {"out": out, "dtype": "float32"} | {name.replace("_", "-"): value for name, value in changes.items()}
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def test_a_run_writes_speeds_and_a_plot(example, tmp_path, capsys):
    assert example.main(arguments(tmp_path / "run")) == 0
    said = capsys.readouterr().out
    assert "dot_product_attention" in said
    with (tmp_path / "run" / "tokens_per_second.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["way"], row["length"]) for row in rows] == [(way, n) for n in ("9", "12") for way in ("jax", "flash")]
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert matplotlib.image.imread(tmp_path / "run" / "tokens_per_second.png").ndim == 3


def setting(example, **changes):
    return example.Setting(
        **{"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "batch": 3, "dtype": "float32", "seed": 1} | changes
    )


def test_the_ways_differ_by_rounding(example):
    _, differences = example.measure(setting(example), ["jax", "flash"], 12, 4)
    assert differences["jax"] == 0
    assert differences["flash"] < 1e-5


def test_tokens_are_those_of_the_model_without_a_cache(example):
    """Greedy tokens from an empty cache are the most likely ones after all tokens so far."""
    own = setting(example)
    graph, split = example.parts(own, "flash", 10)
    params, cache = split(jax.random.key(2))
    first = jnp.array([[3], [7], [11]], jnp.int32)
    after, _, found = jax.jit(example.generate, static_argnums=(0, 4))(graph, params, cache, first, 10)
    assert found.shape == (3, 10)
    assert all(int(leaf) == 10 for leaf in jax.tree.leaves(after) if leaf.ndim == 0)

    model = nnx.merge(graph, cache, params)
    tokens = jnp.concatenate([first, found[:, :-1]], 1)
    x = model.embedding(tokens)
    for block in model.blocks:
        x = x + block.attention(block.attention_norm(x), decode=False, is_causal=True)
        x = x + block.output(nnx.gelu(block.hidden(block.hidden_norm(x))))
    logits = model.embedding.attend(model.norm(x))
    np.testing.assert_array_equal(jnp.argmax(logits, -1), found)


def test_what_does_not_fit_has_no_speed(example, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(example, "filled", fails)
    speeds, differences = example.measure(setting(example), ["jax"], 12, 4)
    assert speeds == [example.Speed("jax", 12, None)]
    assert differences == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 5}, ["--heads", "5", "divisor of --width 32"]),
        ({"kv_heads": 3}, ["--kv-heads", "3", "divisor of --heads 4"]),
        ({"lengths": "4"}, ["--lengths", "4", "more than --tokens 4"]),
        ({"lengths": "4,x"}, ["--lengths", "'x'", "positive integer"]),
        ({"only": "jax,torch"}, ["--only", "'torch'", "jax, cudnn, flash"]),
        ({"dtype": "float16"}, ["--dtype", "float16"]),
        ({"batch": 0}, ["--batch", "'0'", "positive integer"]),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_said_and_nothing_written(example, tmp_path, capsys, changes, words):
    assert example.main(arguments(tmp_path / "run", **changes)) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


def test_cudnn_needs_a_gpu(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert example.main(arguments(tmp_path, only="cudnn")) == 2
    assert "cudnn needs an NVIDIA GPU" in capsys.readouterr().err
