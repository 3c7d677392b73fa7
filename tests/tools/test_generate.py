"""The example that generates: ways give the same tokens, samples are of what is kept, and what cannot be used is said."""

import csv
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import jaxsoftmax
from examples.axes import label_logarithmic

SCRIPT = Path(__file__).parents[2] / "examples" / "generate.py"
SMALL = {"lengths": "9,12", "layers": 1, "width": 32, "heads": 4, "kv-heads": 2, "tokens": 4, "batch": 3, "only": "jax,flash"}

pytestmark = pytest.mark.usefixtures("standard_promotion_all")  # Flax promotes


@pytest.fixture(scope="module", autouse=True)
def compiled_once(example):
    """Runs of the same sampling share their compiled functions, and each is timed once."""
    made, kept, runs = example.ways_to_choose, {}, example.RUNS

    def ways_to_choose(args):
        asked = tuple([getattr(args, name) for name in (*example.SAMPLING, "checkpoint")])
        return kept.setdefault(asked, made(args))

    example.ways_to_choose, example.RUNS = ways_to_choose, 1
    yield
    example.ways_to_choose, example.RUNS = made, runs


def arguments(out, **changes):
    options = SMALL | {"out": out, "dtype": "float32"} | {name.replace("_", "-"): value for name, value in changes.items()}
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ({}, ["argmax"]),
        pytest.param(
            {"top_p": 0.9, "vocabulary": 100, "only": "flash"},
            ["none", "argmax", "jaxsoftmax", "jax"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_writes_speeds_and_a_plot(example, tmp_path, capsys, options, choices):
    assert example.main(arguments(tmp_path / "run", **options)) == 0
    said = capsys.readouterr().out
    assert "dot_product_attention" in said
    assert ("categorical" in said) == ("jaxsoftmax" in choices)
    assert said.count("%") == (6 if "none" in choices else 0)
    with (tmp_path / "run" / "tokens_per_second.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ways = (SMALL | options)["only"].split(",")
    expected = [(length, way, choosing) for length in ("9", "12") for way in ways for choosing in choices]
    assert [(row["length"], row["way"], row["choosing"]) for row in rows] == expected
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    assert matplotlib.image.imread(tmp_path / "run" / "tokens_per_second.png").ndim == 3


def setting(example, **changes):
    sizes = {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "vocabulary": 256}
    return example.Setting(**sizes | {"batch": 3, "dtype": "float32", "seed": 1} | changes)


def test_the_ways_differ_by_rounding(example):
    _, differences = example.measure(setting(example), ["jax", "flash"], 12, 4, {"argmax": example.argmax})
    assert differences["jax"] == 0
    assert differences["flash"] < 1e-5


def test_tokens_are_those_of_the_model_without_a_cache(example):
    """Greedy tokens from an empty cache are the most likely ones after all tokens so far."""
    graph, split = example.parts(setting(example, layers=2), "flash", 10)
    params, cache = jax.jit(split)(jax.random.key(2))
    first = jnp.array([[3], [7], [11]], jnp.int32)
    program = jax.jit(example.generate, static_argnums=(0, 5, 6))
    after, found = program(graph, params, cache, first, jax.random.key(0), 10, example.argmax)
    assert found.shape == (3, 10)
    assert all(int(leaf) == 10 for leaf in jax.tree.leaves(after) if leaf.ndim == 0)

    @jax.jit
    def logits_of(params, cache, tokens):
        model = nnx.merge(graph, cache, params)
        x = model.embedding(tokens)
        for block in model.blocks:
            x = x + block.attention(block.attention_norm(x), decode=False, is_causal=True)
            x = x + block.output(nnx.gelu(block.hidden(block.hidden_norm(x))))
        return model.embedding.attend(model.norm(x))

    tokens = np.concatenate([first, found[:, :-1]], 1)
    np.testing.assert_array_equal(np.argmax(logits_of(params, cache, tokens), -1), found)


def test_what_does_not_fit_has_no_speed(example, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(example, "filled", fails)
    speeds, differences = example.measure(setting(example), ["jax"], 12, 4, {"argmax": example.argmax})
    assert speeds == [example.Speed("jax", 12, "argmax", None)]
    assert differences == {}
    assert "no memory" in example.shown("argmax", None, None)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0.4, 0.25, 0.2, 0.1, 0.05]),
        ({"temperature": 2.0, "top_k": 9}, np.sqrt([0.4, 0.25, 0.2, 0.1, 0.05])),
        ({"top_k": 3}, [0.4, 0.25, 0.2]),
        ({"top_p": 0.7}, [0.4, 0.25, 0.2]),
        ({"top_p": 0.0}, [0.4]),
        ({"top_k": 3, "top_p": 0.7}, [0.4, 0.25]),
        ({"min_p": 0.2}, [0.4, 0.25, 0.2, 0.1]),
        ({"temperature": 0.0, "min_p": 0.5}, [0.4]),
    ],
    ids=str,
)
def test_both_samplers_draw_from_what_is_kept(example, options, kept):
    options = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None} | options
    order = np.array([3, 0, 4, 1, 2])  # by weight
    logits = np.zeros(5, np.float32)
    logits[order] = np.log([0.4, 0.25, 0.2, 0.1, 0.05])
    logits = np.broadcast_to(logits, (4000, 5))
    expected = np.zeros(5)
    expected[order[: len(kept)]] = kept / np.sum(kept)
    samplers = {"jaxsoftmax": jaxsoftmax.categorical, "jax": example.by_jax}

    @jax.jit
    def chosen(key, logits):
        return {name: choose(key, logits, **options) for name, choose in samplers.items()}

    for name, found in chosen(jax.random.key(0), logits).items():
        assert (found.shape, found.dtype) == ((4000,), jnp.int32), name
        shares = np.bincount(found, minlength=5) / 4000
        np.testing.assert_array_equal(shares > 0, expected > 0, err_msg=name)
        np.testing.assert_allclose(shares, expected, atol=0.04, err_msg=name)  # five standard deviations


CONTEXT = 16


@pytest.fixture(scope="module")
def checkpoint(example, tmp_path_factory):
    """What a training leaves, of a model with tokens that are no bytes, whose layers all count and which says plain text."""
    out = tmp_path_factory.mktemp("trained") / "run"
    options = {"steps": 12, "batch": 4, "context": CONTEXT, "width": 32, "heads": 2, "layers": 2, "attention": "softmax"}
    options |= {"vocabulary": 300, "out": out}
    train = example.train_tiny_lm
    args = train.parse_arguments([str(part) for name, value in options.items() for part in (f"--{name}", value)])
    _, state, record = train.begin(args, "")
    rng = np.random.default_rng(0)

    def moved(param):  # some are zero at first
        found = np.asarray(param) + rng.normal(0, 0.1, param.shape).astype(param.dtype)
        if len(found) == options["vocabulary"]:
            found[np.r_[:32, 127 : len(found)]] = 0  # and so less likely than some others
        return found

    train.make_folder(out)
    train.save_checkpoint(out, state._replace(params=jax.tree.map(moved, state.params)), record)
    return out


def text_of(example, capsys, checkpoint, prompt, *options):
    """The text that a model goes on with, after the table."""
    capsys.readouterr()
    assert example.main(["--checkpoint", str(checkpoint), "--prompt", prompt, "--tokens", "24", *options]) == 0
    table, _, text = capsys.readouterr().out.partition(f"\n\n{prompt}")
    rows = [line.split() for line in table.partition(example.HEADER)[2].splitlines()[1:]]
    assert [row[0] for row in rows] == ["none", "argmax", "jaxsoftmax", "jax"]
    assert all(float(row[1]) > 0 for row in rows)
    assert [len(row) == 3 and row[2].endswith("%") for row in rows] == [False, True, True, True]
    return text.removesuffix("\n")


SAMPLED = ("--top-k", "40", "--min-p", "0.01", "--temperature", "0.9", "--batch", "2")


def test_the_seed_fixes_the_text(example, checkpoint, capsys):
    options = "#", *SAMPLED
    text = text_of(example, capsys, checkpoint, *options)
    assert text == text_of(example, capsys, checkpoint, *options)
    assert text != text_of(example, capsys, checkpoint, *options, "--seed", "2")
    one, other = text.split("\n\n#")
    assert one != other


def test_text_and_numbers_of_a_checkpoint_are_written_where_it_is_asked_for(example, checkpoint, capsys, tmp_path):
    out = tmp_path / "some" / "folder"
    text = text_of(example, capsys, checkpoint, "#", *SAMPLED, "--out", str(out)).partition("\n\nwrote")[0]
    assert (out / "text.txt").read_text() == f"#{text}\n"
    header, *rows = (out / "tokens_per_second.csv").read_text().splitlines()
    assert header == ",".join(example.Speed._fields)
    assert [row.split(",")[:3] for row in rows] == [["flash", "25", way] for way in ("none", "argmax", "jaxsoftmax", "jax")]
    assert sorted(path.name for path in out.iterdir()) == ["text.txt", "tokens_per_second.csv"]


@pytest.mark.parametrize(("low", "high"), [(0.021, 0.46), (212.0, 248.0), (3.0, 90000.0)])
def test_axes_have_the_lengths_that_were_measured_and_plain_numbers(low, high):
    figure = Figure()
    axes = figure.subplots()
    axes.plot([128, 512, 3000], [low, math.sqrt(low * high), high])
    axes.set_yscale("log")
    label_logarithmic(axes, [128, 512, 3000])
    FigureCanvasAgg(figure).draw()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "512", "3000"]
    assert not axes.get_xticks(minor=True).size
    assert not axes.get_yticks(minor=True).size
    shown = [label.get_text() for label, at in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True) if low <= at <= high]
    assert len(shown) >= 2
    assert all(re.fullmatch(r"[\d.]+(e\+0\d)?", label) for label in shown), shown


def test_text_at_temperature_0_is_the_most_likely(example, checkpoint, capsys):
    text = text_of(example, capsys, checkpoint, "The cat ", "--temperature", "0", "--tokens", "8")
    model, settings = example.train_tiny_lm.trained(checkpoint, "")
    tokens = np.frombuffer(f"The cat {text}".encode(), np.uint8)
    assert len(tokens) == settings.context == CONTEXT
    logits = jax.jit(lambda tokens: model(tokens))(tokens[None])
    np.testing.assert_array_equal(np.argmax(logits[0, 7:-1], -1), tokens[8:])


def test_a_cache_changes_no_logits(example, checkpoint):
    """Also beyond the context of the training: each token sees as many before it."""
    tokens = np.random.default_rng(0).integers(0, 256, (2, 3 * CONTEXT), np.int32)
    model, settings = example.train_tiny_lm.trained(checkpoint, "")
    for block in model.blocks:
        window = (CONTEXT - 1, 0)
        block.attention.attend = functools.partial(jaxsoftmax.dot_product_attention, is_causal=True, local_window_size=window)
    expected = np.asarray(jax.jit(lambda tokens: model(tokens))(tokens))[..., :256]
    graph, cache, params = nnx.split(example.Trained(model, settings, 2, 3 * CONTEXT), nnx.Cache, ...)
    step, start = jax.jit(example.step, static_argnums=0), 0
    for end in [5, *range(6, 3 * CONTEXT + 1)]:
        cache, logits = step(graph, params, cache, tokens[:, start:end])
        logits = np.asarray(logits)
        np.testing.assert_allclose(logits[:, :256], expected[:, end - 1], atol=1e-5)
        assert np.all(logits[:, 256:] == -np.inf)
        start = end


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "2"], ["--layers", "not allowed", "--checkpoint"]),
        (["--kv-heads", "2"], ["--kv-heads", "not allowed", "--checkpoint"]),
        (["--prompt", ""], ["--prompt", "empty"]),
        (["--checkpoint", "nowhere"], ["--checkpoint", "no checkpoint in nowhere"]),
        (["--temperature", "-1"], ["--temperature", "'-1'", "0 or more"]),
        (["--temperature", "inf"], ["--temperature", "'inf'"]),
        (["--top-k", "0"], ["--top-k", "'0'", "positive integer"]),
        (["--top-p", "1.5"], ["--top-p", "'1.5'", "from 0 to 1"]),
        (["--min-p", "nan"], ["--min-p", "'nan'", "from 0 to 1"]),
        (["--seed", "-1"], ["--seed", "'-1'"]),
    ],
    ids=str,
)
def test_what_a_checkpoint_cannot_be_used_with_is_said(example, checkpoint, capsys, monkeypatch, tmp_path, options, words):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert example.main(["--checkpoint", str(checkpoint), *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("generate.py: error: argument --")
    assert said.err.count("\n") == 1
    assert all(word in said.err for word in words), said.err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(example, checkpoint, tmp_path, capsys):
    (record,) = checkpoint.glob("checkpoints/save_*/record.json")
    save = tmp_path / "checkpoints" / "save_1"
    save.mkdir(parents=True)
    (save / "record.json").write_text(record.read_text())
    assert example.main(["--checkpoint", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"argument --checkpoint: checkpoint {save} is damaged" in said
    assert "is missing" in said


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
        ({"prompt": "The "}, ["--prompt", "needs --checkpoint"]),
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
