"""The language-model example: it learns, repeats itself, resumes bit for bit, and turns bad input away untouched."""

import contextlib
import functools
import io
import math
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxsoftmax._core.target import HOPPER, lowering_for

from ..support import oracle
from ..support.runs import results, saved_arrays, snapshot

SCRIPT = Path(__file__).parents[2] / "examples" / "train_tiny_lm.py"
# The last step is no multiple of anything, and evaluations and checkpoints fall on different steps.
SMALL = {
    "--steps": 44,
    "--batch": 8,
    "--context": 32,
    "--width": 32,
    "--heads": 2,
    "--layers": 1,
    "--lr": 0.01,
    "--eval-every": 12,
    "--checkpoint-every": 15,
    "--sample-length": 40,
}


# optax corrects Adam's bias with float ** int32, which strict promotion refuses.
pytestmark = pytest.mark.usefixtures("standard_promotion_all")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    pick = random.Random(0).choice
    lines = []
    for _ in range(300):
        lines.append(f"the {pick(['cat', 'dog'])} {pick(['sees', 'chases'])} the {pick(['mouse', 'bird'])}.\n")
    path = tmp_path_factory.mktemp("text") / "animals.txt"
    path.write_text("".join(lines))
    return path


def arguments(text, out, *more, **changes):
    options = SMALL | {"--text": text, "--out": out} | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [str(part) for option in options.items() for part in option] + list(more)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(example):
    """Runs of the same settings share their compiled functions, as with JAX's cache of compiled programs.

    Those of other steps share what does not depend on it, and all runs the trigram models of the same text.
    """
    made, model, runs = example.make_run, example.Trigram, {}

    def make_run(args):
        settings = {name: getattr(args, name) for name in (*example.RECORDED, "sample_length", "mesh")}
        run = made(args)
        program = runs.setdefault(tuple(settings.items()), run.train)
        of_steps = {"steps", "eval_every", "lr"}
        sample = runs.setdefault(("sample", *(settings[name] for name in sorted(settings.keys() - of_steps))), run.sample)
        others = sorted(settings.keys() - of_steps - {"seed", "sample_length"})
        evaluate = runs.setdefault(("evaluate", *(settings[name] for name in others)), run.evaluate)
        return run._replace(train=program, evaluate=evaluate, sample=sample)

    models = functools.cache(lambda text: model(np.frombuffer(text, np.uint8)))
    example.make_run, example.Trigram = make_run, lambda text: models(text.tobytes())
    yield
    example.make_run, example.Trigram = made, model


@pytest.fixture(scope="module")
def finished(example, text, tmp_path_factory):
    """The directory of one uninterrupted run; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert example.main(arguments(text, out)) == 0
    return out


@pytest.fixture(scope="module")
def compared(example, text, tmp_path_factory):
    """The directory of the same run with each attention, and what was printed."""
    out, printed, shown = tmp_path_factory.mktemp("compared") / "run", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(shown):
        assert example.main(arguments(text, out, "--compare")) == 0
    return out, printed.getvalue(), shown.getvalue()


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def assert_same_run(left, right):
    one, other = results(left), results(right)
    assert one.pop("tokens_per_second") > 0
    assert other.pop("tokens_per_second") > 0
    assert one == other
    arrays, others = saved_arrays(left), saved_arrays(right)
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name, strict=True)


def refused(example, capfd, *args):
    """The one line on standard error of a run that must be turned away."""
    capfd.readouterr()
    assert example.main(list(args)) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("train_tiny_lm.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def trained(example, args, steps):
    """The losses of so many steps, and the bits per byte held out after them, of a run that writes nothing."""
    training, held_out = example.load_text(args.text, args.context)
    run, state, _ = example.begin(args, "")
    state = run.train(state, jnp.asarray(training), steps)
    windows, scored = example.held_out_windows(held_out, args.context, args.batch)
    nats = run.evaluate(state.params, jnp.asarray(windows), jnp.asarray(scored))
    return np.asarray(state.losses)[:steps], np.sum(nats) / np.sum(scored) / math.log(2)


def test_learns_more_than_byte_frequencies(finished, text):
    result = results(finished)
    losses = np.asarray(result["training_losses_nats"])
    assert losses.shape == (44,)
    assert losses[0] > math.log(256) * 0.8
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    assert [step for step, _ in result["held_out_history"]] == [12, 24, 36, 44]
    contents = text.read_bytes()
    training, held_out = contents[: -(len(contents) // 10)], contents[-(len(contents) // 10) :]
    frequencies = Counter(training)
    unigram = -sum(math.log2(frequencies[byte] / len(training)) for byte in held_out) / len(held_out)
    assert result["held_out_bits_per_byte"] == result["held_out_history"][-1][1] < 0.8 * unigram
    assert 0 < result["trigram_bits_per_byte"] < unigram


def test_draws_the_curve(finished):
    picture = matplotlib.image.imread(finished / "loss.png")
    assert min(picture.shape[:2]) > 300
    assert picture[..., :3].std() > 0.05
    assert {path.name for path in finished.iterdir()} == {"checkpoints", "loss.png", "results.json"}


def test_the_seed_fixes_the_run(example, text, finished, compared, tmp_path):
    result = results(finished)
    out, printed, shown = compared
    assert_same_run(finished, out / result["settings"]["attention"])
    assert len(result["sample"]) == 40
    assert example.readable(np.frombuffer(result["sample"].encode(), np.uint8)) in printed
    bits, trigram = result["held_out_bits_per_byte"], result["trigram_bits_per_byte"]
    assert f"held out: {bits:.3f} bits/byte; a trigram model of the same split: {trigram:.3f} bits/byte" in printed
    assert "bits/byte" in shown
    assert "tokens/s" in shown
    of_another_seed = arguments(text, tmp_path / "other", seed=1, attention=result["settings"]["attention"])
    losses, _ = trained(example, example.parse_arguments(of_another_seed), steps=1)
    assert losses[0] != np.float32(result["training_losses_nats"][0])


def after_steps(count, each):
    """How far apart, relative to themselves, losses of two runs may be, if each step adds at most so much."""
    return each * np.arange(1, count + 1)


def test_the_attentions_agree(compared):
    out, printed, _ = compared
    flash, softmax, theirs = (results(out / name) for name in ("flash", "softmax", "jax"))
    for ours in (flash, softmax):
        losses, others = ours["training_losses_nats"], theirs["training_losses_nats"]
        most = after_steps(len(losses), 64 * oracle.EPS)  # chosen, not derived: 64 roundings to float32 a step
        assert np.all(np.abs(np.divide(losses, others) - 1) <= most)
        assert ours["held_out_bits_per_byte"] == pytest.approx(theirs["held_out_bits_per_byte"], rel=most[-1])
    rows = {
        line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith(("flash ", "softmax ", "jax "))
    }
    assert rows.keys() == {"flash", "softmax", "jax"}
    for name, result in {"flash": flash, "softmax": softmax, "jax": theirs}.items():
        training, held_out, speed, over = rows[name]
        assert float(training) == pytest.approx(np.mean(result["training_losses_nats"][-4:]) / math.log(2), abs=1e-4)
        assert float(held_out) == pytest.approx(result["held_out_bits_per_byte"], abs=1e-4)
        assert speed == f"{result['tokens_per_second']:,.0f}"
        assert f"trained at {speed} tokens/s" in printed
        assert over == f"{result['tokens_per_second'] / theirs['tokens_per_second']:.2f}x"
    assert "largest difference of the curves: " in printed
    assert matplotlib.image.imread(out / "comparison.png")[..., :3].std() > 0.05


def test_the_losses_agree(example, text, tmp_path):
    found = {}
    for loss in example.LOSSES:
        options = arguments(text, tmp_path / loss, steps=8, loss=loss, vocabulary=300, attention="softmax")
        found[loss] = trained(example, example.parse_arguments(options), 8)
    others, expected = found.pop("optax")
    most = after_steps(len(others), 64 * oracle.EPS)
    assert found.keys() == {"cross_entropy", "linear"}
    for loss, (losses, bits) in found.items():
        assert np.all(np.abs(losses / others - 1) <= most), loss
        assert bits == pytest.approx(expected, rel=most[-1]), loss


MESH = "data=2,sequence=2,vocabulary=2"


def needs_devices(count):
    if jax.device_count() != count:
        pytest.skip(f"needs {count} devices, and JAX sees {jax.device_count()}")


@pytest.mark.parametrize("loss", ["linear", *(pytest.param(x, marks=pytest.mark.slow) for x in ("cross_entropy", "optax"))])
@pytest.mark.parametrize("mesh", [MESH, pytest.param("vocabulary=4,data=2", marks=pytest.mark.slow)])
def test_a_mesh_trains_as_one_device(example, text, tmp_path, loss, mesh):
    needs_devices(8)
    options = {"steps": 8, "loss": loss, "vocabulary": 300}
    assert example.main(arguments(text, tmp_path / "mesh", "--mesh", mesh, **options)) == 0
    several = results(tmp_path / "mesh")
    assert several["settings"]["attention"] == "softmax"
    args = example.parse_arguments(arguments(text, tmp_path / "one", **options, attention="softmax"))
    losses, bits = trained(example, args, 8)  # which `test_the_losses_agree` trains too
    assert np.all(np.abs(losses / several["training_losses_nats"] - 1) <= after_steps(len(losses), 64 * oracle.EPS))
    assert bits == pytest.approx(several["held_out_bits_per_byte"], rel=len(losses) * 64 * oracle.EPS)


@pytest.mark.parametrize("loss", ["cross_entropy", "linear"])
def test_on_a_mesh_no_device_has_all_logits_nor_the_embedding(example, text, tmp_path, loss):
    needs_devices(8)
    args = example.parse_arguments(arguments(text, tmp_path, mesh=MESH, loss=loss, vocabulary=320, attention="flash"))
    with example.mesh_of(args):
        run, state, _ = example.begin(args, "")
        training = np.frombuffer(text.read_bytes(), np.uint8)
        compiled = run.train.lower(state, training, 1).compile()
        state = compiled(state, training, 1)
    for name, array in example.table(state).items():
        assert array.sharding.is_equivalent_to(
            jax.NamedSharding(args.mesh, jax.P("vocabulary") if "embedding" in name else jax.P()), array.ndim
        )
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", compiled.as_text()))
    assert "160,32" in shapes  # half of the embedding
    assert not any("320" in shape.split(",") for shape in shapes)


def test_a_checkpoint_goes_on_on_a_mesh(example, text, copied):
    needs_devices(8)
    before = saved_arrays(copied)
    settings = results(copied)["settings"]
    args = example.parse_arguments(arguments(text, copied, "--resume", mesh=MESH, attention=settings["attention"]))
    with example.mesh_of(args):
        _, state, record = example.begin(args, settings["text"])
    assert record["settings"] == settings
    assert state.params["embedding"]["embedding"][...].sharding.spec == jax.P("vocabulary")
    for name, array in example.table(state).items():
        np.testing.assert_array_equal(array, before[name])


def test_no_run_time_is_promised_and_the_bar_estimates_it(example, compared):
    _, _, shown = compared
    assert not any(word in example.__doc__ for word in ("minute", "second"))
    assert any("left," in part and "about " in part and "?" not in part for part in shown.split("\r"))


def test_no_speed_includes_compilation(example, text, tmp_path, monkeypatch):
    made, clock = example.make_run, iter(range(10**6))

    def make_run(args):
        run, bytes_ = made(args), np.zeros(1, np.uint8)

        def train(state, text, stop):
            if int(state.step) == stop:  # as if compilation took long
                [next(clock) for _ in range(1000)]
            return state._replace(step=np.int32(stop))

        return run._replace(train=train, evaluate=lambda *_: np.zeros(1), sample=lambda *_: bytes_)

    monkeypatch.setattr(example, "make_run", make_run)
    monkeypatch.setattr(example.time, "perf_counter", lambda: next(clock))
    assert example.main(arguments(text, tmp_path / "run", steps=3, sample_length=1)) == 0
    assert results(tmp_path / "run")["tokens_per_second"] == 3 * 8 * 32


@pytest.mark.slow
def test_comparing_in_bfloat16_goes_on_after_an_interrupt_and_without_memory(
    example, text, tmp_path, capfd, interrupting, monkeypatch
):
    out, options = tmp_path / "run", {"steps": 6, "sample_length": 1, "dtype": "bfloat16"}
    interrupting(2)
    assert example.main(arguments(text, out, "--compare", **options)) == 130
    assert [bool(example.checkpoints(out / name)) for name in ("flash", "softmax", "jax")] == [True, True, False]
    made = example.make_run

    def make_run(args):
        if args.attention == "jax":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")
        return made(args)

    monkeypatch.setattr(example, "make_run", make_run)
    capfd.readouterr()
    assert example.main(arguments(text, out, "--compare", "--resume", **options)) == 0
    printed = capfd.readouterr().out
    assert "--attention jax runs out of memory: try a smaller --batch\n" in printed
    assert "\njax        out of memory\n" in printed
    flash, softmax = (results(out / name)["training_losses_nats"] for name in ("flash", "softmax"))
    assert np.all(np.abs(np.divide(flash, softmax) - 1) <= after_steps(6, 2.0**-8))  # chosen, not derived: a rounding
    before = snapshot(out)
    assert "seed was 0, now 7" in refused(example, capfd, *arguments(text, out, "--compare", "--resume", seed=7, **options))
    assert snapshot(out) == before
    assert example.main(arguments(text, tmp_path / "jax", attention="jax")) == 1
    assert capfd.readouterr().err.endswith("error: --attention jax runs out of memory: try a smaller --batch\n")


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("options", "platform", "chosen", "why"),
    [
        (
            ["--preset", "small"],
            "cuda",
            "flash",
            "attention: flash, dot_product_attention by mosaic, dot_product_attention_vjp by mosaic",
        ),
        (
            ["--preset", "small"],
            "cpu",
            "softmax",
            "not flash, as no kernel runs dot_product_attention (it runs on cuda, not on cpu)",
        ),
        (["--preset", "small", "--heads", "1"], "cuda", "softmax", "head size must be from 1 to 512, got 768"),
        ([], "cuda", "flash", "attention: flash, dot_product_attention by mosaic, dot_product_attention_vjp by mosaic"),
        (
            ["--preset", "small", "--heads", "2"],
            "cuda",
            "softmax",
            "no kernel runs dot_product_attention_vjp (derivatives of head sizes above 256 have no kernel, got 384)",
        ),
        (
            ["--attention", "flash"],
            "cpu",
            "flash",
            "attention: flash, dot_product_attention by xla, dot_product_attention_vjp by xla",
        ),
        (["--attention", "jax"], "cpu", "jax", "attention: jax, jax.nn.softmax"),
    ],
)
def test_flash_is_chosen_where_kernels_run_it(example, options, platform, chosen, why):
    with lowering_for(HOPPER):
        name, line = example.choose_attention(example.parse_arguments(options), platform)
    assert name == chosen
    assert why in line


def test_presets(example):
    tiny, small = example.parse_arguments([]), example.parse_arguments(["--preset", "small", "--attention", "flash"])
    assert (tiny.layers, tiny.width, tiny.dtype, tiny.deterministic) == (4, 128, "float32", True)
    assert (small.layers, small.width, small.heads, small.context) == (12, 768, 12, 1024)
    assert (small.dtype, small.deterministic) == ("bfloat16", False)
    state = jax.eval_shape(lambda: example.make_run(small).state)
    assert sum(param.size for param in jax.tree.leaves(state.params)) == pytest.approx(85e6, rel=0.01)
    assert {array.dtype.name for array in jax.tree.leaves(state)} == {"float32", "int32"}
    changed = example.parse_arguments(["--preset", "small", "--layers", "4", "--dtype", "float32", "--deterministic"])
    assert vars(changed) == vars(small) | {"layers": 4, "dtype": "float32", "deterministic": True, "attention": None}


@pytest.fixture
def interrupting(example, monkeypatch):
    """Presses Ctrl-C during the given call of the compiled steps."""
    made = example.make_run
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_in(call):
        calls = iter(range(1, 1000))

        def make_run(args):
            run = made(args)

            def train(*inputs):
                # Those of no steps only compile.
                if int(inputs[0].step) < inputs[2] and next(calls) == call:
                    signal.raise_signal(signal.SIGINT)
                return run.train(*inputs)

            return run._replace(train=train)

        monkeypatch.setattr(example, "make_run", make_run)

    yield interrupt_in
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def test_resumes_bit_for_bit(example, text, finished, tmp_path, capfd, interrupting):
    out = tmp_path / "run"
    # Calls of the steps end at 10, 12, 15, 20, ...; so 20 is where neither an evaluation nor a checkpoint is due.
    interrupting(4)
    assert example.main(arguments(text, out)) == 130
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "train_tiny_lm.py: interrupted after step 20; --resume continues from there"
    assert not (out / "results.json").exists()
    assert int(saved_arrays(out)["step"]) == 20
    interrupting(3)  # the resumed run in turn, which ends calls at 24, 30, 36
    assert example.main(arguments(text, out, "--resume", checkpoint_every=100)) == 130
    assert "after step 36;" in capfd.readouterr().err
    interrupting(0)
    assert example.main(arguments(text, out, "--resume")) == 0
    assert_same_run(finished, out)
    assert (out / "loss.png").read_bytes() == (finished / "loss.png").read_bytes()


def test_resuming_a_finished_run_changes_no_result(example, text, finished, copied):
    assert example.main(arguments(text, copied, "--resume")) == 0
    assert_same_run(finished, copied)
    assert results(finished) == results(copied)  # the speed too


def test_a_finished_run_goes_on_to_more_steps(example, text, finished, copied, interrupting, capfd):
    steps = SMALL["--steps"]
    interrupting(2)
    assert example.main(arguments(text, copied, "--resume", steps=steps + 20)) == 130
    out, error = capfd.readouterr()
    assert f"a finished run goes on to step {steps + 20}" in out
    assert re.search(r"[\d.]+ bits/byte, [\d,]+ tokens/s", error), "the unit of the bar is that of what is held out"
    error = refused(example, capfd, *arguments(text, copied, "--resume", steps=steps + 30))
    assert f"steps was {steps + 20}, now {steps + 30}" in error, "it is not finished"
    interrupting(0)
    assert example.main(arguments(text, copied, "--resume", steps=steps + 20)) == 0
    before, after = results(finished), results(copied)
    assert after["settings"] == before["settings"] | {"steps": steps + 20}
    assert len(after["training_losses_nats"]) == steps + 20
    assert after["training_losses_nats"][:steps] == before["training_losses_nats"]
    assert 0 < min(after["training_losses_nats"][steps:]) < before["training_losses_nats"][0]
    assert after["held_out_history"][: len(before["held_out_history"])] == before["held_out_history"]
    assert after["held_out_history"][-1][0] == steps + 20
    assert f"steps was {steps + 20}, now {steps}" in refused(example, capfd, *arguments(text, copied, "--resume"))


def test_starting_over_keeps_the_old_run_until_it_has_its_own(example, text, finished, copied, monkeypatch, capfd):
    before = snapshot(copied)

    def fails(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "save", fails)
        assert example.main(arguments(text, copied, steps=2)) == 130
    assert capfd.readouterr().err.splitlines()[-1] == "train_tiny_lm.py: interrupted"
    after = snapshot(copied)
    assert after.keys() - before.keys() <= {Path("checkpoints/unfinished")}
    assert before.items() <= after.items()
    with monkeypatch.context() as patch:  # an error while the curve is written leaves the old one whole
        patch.setattr(example.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        assert example.main(arguments(text, copied, steps=2)) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "train_tiny_lm.py: error: disk full"
    for name in ("loss.png", "results.json"):
        assert (copied / name).read_bytes() == (finished / name).read_bytes()
    assert example.main(arguments(text, copied, steps=2)) == 0
    assert len(results(copied)["training_losses_nats"]) == 2
    assert {path.name for path in copied.iterdir()} == {"checkpoints", "loss.png", "results.json"}
    assert len(list((copied / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_divergence_is_an_error(example, text, tmp_path, capfd, monkeypatch, loss):
    made = example.make_run

    def make_run(args):
        def train(state, text, stop):
            losses = state.losses.at[int(state.step) : stop].set(loss if stop > 12 else 1)
            return state._replace(step=np.int32(stop), losses=losses)

        return made(args)._replace(train=train, evaluate=lambda *_: np.ones(1))

    monkeypatch.setattr(example, "make_run", make_run)
    assert example.main(arguments(text, tmp_path / "run")) == 1
    assert capfd.readouterr().err.splitlines()[-1].endswith(f"the loss is {loss} at step 15: try a smaller --lr")
    assert not example.checkpoints(tmp_path / "run")


def kneser_ney(training, first, second, third):
    """Interpolated Kneser-Ney, from its definition and without arrays."""

    def smoothed(counts, context, byte, shorter):
        values = list(counts.values())
        once, twice = values.count(1), values.count(2)
        discount = min(max(once / (once + 2 * twice) if once else 0.0, 0.1), 0.9)
        followers = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == context}
        if not followers:
            return shorter
        freed = discount * len(followers)
        return (max(followers.get(byte, 0) - discount, 0) + freed * shorter) / sum(followers.values())

    trigrams = Counter(zip(training, training[1:], training[2:], strict=False))
    pairs = Counter(gram[1:] for gram in trigrams)
    singles = Counter(gram[1:] for gram in pairs)
    probability = smoothed(singles, (), third, 1 / 256)
    probability = smoothed(pairs, (second,), third, probability)
    return smoothed(trigrams, (first, second), third, probability)


@pytest.mark.parametrize("training", [b"abracadabra, abracadabra! abcabcabd \xff\x00", b"ababababab", b"xyz", b"xy"])
def test_trigram_baseline(example, training):
    held_out = b"abra cadabra \xfe\xff abd"
    model = example.Trigram(np.frombuffer(training, np.uint8))
    expected = [kneser_ney(training, *gram) for gram in zip(held_out, held_out[1:], held_out[2:], strict=False)]
    assert model.bits_per_byte(np.frombuffer(held_out, np.uint8)) == pytest.approx(-np.log2(expected).mean(), rel=1e-12)
    everything = np.arange(256)
    for first, second in (b"ab", b"a!", b"zz", b"br"):
        probabilities = model.probability(np.full(256, first), np.full(256, second), everything)
        assert probabilities.min() > 0
        assert probabilities.sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("size", "context", "batch"), [(100, 8, 4), (9, 8, 4), (10, 8, 1), (57, 7, 3), (30, 1, 8), (101, 2, 5)]
)
def test_held_out_windows_score_each_byte_once(example, size, context, batch):
    held_out = np.random.default_rng(0).permutation(size).astype(np.uint8)  # every byte is another: it tells its place
    windows, scored = example.held_out_windows(held_out, context, batch)
    assert windows.shape == (*scored.shape[:2], context + 1)
    assert windows.shape[1] == batch
    np.testing.assert_array_equal(np.sort(windows[..., 1:][scored]), np.sort(held_out[2:]))
    place = {int(byte): index for index, byte in enumerate(held_out)}
    for window, targets in zip(windows.reshape(-1, context + 1), scored.reshape(-1, context), strict=True):
        start = place[int(window[0])]
        if targets.any():
            np.testing.assert_array_equal(window, held_out[start : start + context + 1])
            assert start == 0 or np.flatnonzero(targets)[0] >= context // 2 - 1


def test_default_text_is_the_documentation_each_paragraph_once(example):
    text = example.default_text()
    assert text == example.default_text()
    assert len(text) > 300_000
    paragraphs = text.split(b"\n\n")
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *[(f"--{name}", value, f"--{name}") for name in ("steps", "batch", "width", "lr") for value in ("0", "-1", "x")],
        *[(f"--{name}", "0", f"--{name}") for name in ("context", "heads", "layers", "eval-every", "checkpoint-every")],
        ("--sample-length", "0", "--sample-length"),
        ("--steps", "1.5", "'1.5'"),
        ("--lr", "nan", "--lr"),
        ("--lr", "inf", "--lr"),
        ("--seed", "-1", "--seed"),
        ("--seed", str(2**32), "--seed"),
        ("--attention", "exp", "--attention: invalid choice: 'exp'"),
        ("--loss", "mse", "--loss: invalid choice: 'mse'"),
        ("--vocabulary", "255", "--vocabulary 255 is less than 256"),
        ("--preset", "large", "--preset: invalid choice: 'large'"),
        ("--dtype", "float16", "--dtype: invalid choice: 'float16'"),
        ("--unknown", "1", "--unknown"),
        ("--mesh", "data=2,model=4", "names 'model', and the axes are data, sequence, vocabulary"),
        ("--mesh", "data=2,data=4", "names an axis twice"),
        ("--mesh", "data", "'' is not a positive integer"),
        ("--mesh", "data=0", "'0' is not a positive integer"),
        ("--mesh", "data=3", "--mesh data=3,sequence=1,vocabulary=1 takes 3 devices, and JAX sees"),
        ("--heads", "3", "--heads 3 does not divide --width 32"),
        ("--heads", "32", "even parts"),
        ("--context", "9000", "training part has"),
        ("--context", "1000", "held-out part has"),
    ],
)
def test_bad_options_are_refused(example, text, finished, tmp_path, capfd, option, value, named):
    assert named in refused(example, capfd, *arguments(text, tmp_path / "out"), option, value)
    assert list(tmp_path.iterdir()) == []
    before = snapshot(finished)
    refused(example, capfd, *arguments(text, finished), option, value)
    assert snapshot(finished) == before


@pytest.mark.parametrize("option", ["batch", "context", "vocabulary"])
def test_what_a_mesh_cannot_share_is_refused(example, text, tmp_path, capfd, option):
    needs_devices(8)
    axis = {"batch": "data", "context": "sequence", "vocabulary": "vocabulary"}[option]
    said = refused(example, capfd, *arguments(text, tmp_path / "out"), f"--{option}", "300", "--mesh", f"{axis}=8")
    assert said == f"train_tiny_lm.py: error: --{option} 300 cannot be shared evenly by {axis}=8 of --mesh\n"


def test_bad_texts_are_refused(example, tmp_path, capfd):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "empty").touch()
    (texts / "short").write_bytes(b"x" * 200)
    (texts / "locked").write_bytes(b"x" * 9999)
    (texts / "locked").chmod(0)
    cases = {
        "missing": "No such file",
        "empty": "is empty",
        "short": "its held-out part has 20 bytes, and --context 32 needs 33",
    }
    cases |= {".": "Is a directory", "nu\0ll": "null"}
    if not os.access(texts / "locked", os.R_OK):  # root may read it all the same
        cases["locked"] = "Permission denied"
    for name, complaint in cases.items():
        error = refused(example, capfd, *arguments(texts / name, tmp_path / "out"))
        assert complaint in error
        assert str(texts / name).split("\0")[0] in error
    assert not (tmp_path / "out").exists()


def test_bad_output_is_refused(example, text, tmp_path, capfd):
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is not a directory" in refused(example, capfd, *arguments(text, tmp_path / "file"))
    assert "Not a directory" in refused(example, capfd, *arguments(text, tmp_path / "file" / "below"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_comparing_takes_no_attention(example, text, tmp_path, capfd):
    error = refused(example, capfd, *arguments(text, tmp_path / "out", "--compare", attention="jax"))
    assert "--attention jax cannot be given with --compare" in error
    assert not (tmp_path / "out").exists()


def test_resuming_nothing_is_refused(example, text, tmp_path, capfd):
    out = tmp_path / "out"
    assert f"no checkpoint in {out}" in refused(example, capfd, *arguments(text, out, "--resume"))
    assert not out.exists()
    out.mkdir()
    assert f"no checkpoint in {out}" in refused(example, capfd, *arguments(text, out, "--resume"))
    assert f"no checkpoint in {out / 'flash'} or " in refused(example, capfd, *arguments(text, out, "--resume", "--compare"))
    assert list(out.iterdir()) == []


def test_resuming_another_run_is_refused(example, text, finished, tmp_path, capfd):
    before = snapshot(finished)
    changes = {"steps": 50, "batch": 4, "context": 16, "width": 16, "heads": 4, "layers": 2, "lr": 0.02, "eval_every": 9}
    changes |= {"seed": 7, "attention": "jax", "dtype": "bfloat16", "loss": "optax", "vocabulary": 300}
    error = refused(example, capfd, *arguments(text, finished, "--resume", "--no-deterministic", **changes))
    before_changes = SMALL | {"--seed": 0, "--attention": results(finished)["settings"]["attention"], "--dtype": "float32"}
    before_changes |= {"--loss": "cross_entropy", "--vocabulary": 256}
    for name, value in changes.items():
        assert f"{name} was {before_changes['--' + name.replace('_', '-')]}, now {value}" in error
    assert "deterministic was True, now False" in error
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes().replace(b"mouse", b"moose"))
    assert "text was " in refused(example, capfd, *arguments(other, finished, "--resume"))
    assert snapshot(finished) == before


def largest(save):
    return max((path for path in save.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda save: cut(largest(save)), "has changed"),
        (lambda save: flip(largest(save)), "has changed"),
        (lambda save: largest(save).unlink(), "is missing"),
        (lambda save: shutil.rmtree(save / "arrays"), "is missing"),
        (lambda save: cut(save / "record.json"), "JSONDecodeError"),
        (lambda save: (save / "record.json").write_text("{}"), "KeyError"),
        (lambda save: flip(save / "record.json"), ""),
        (lambda save: (save / "record.json").unlink(), "No such file"),
    ],
)
def test_a_damaged_checkpoint_is_refused(example, text, copied, capfd, damage, complaint):
    (save,) = (copied / "checkpoints").iterdir()
    damage(save)
    before = snapshot(copied)
    error = refused(example, capfd, *arguments(text, copied, "--resume"))
    assert f"checkpoint {save} is damaged" in error
    assert complaint in error
    assert snapshot(copied) == before


def test_a_checkpoint_of_other_arrays_is_refused(example, text, copied, capfd, monkeypatch):
    wider = example.LanguageModel
    monkeypatch.setattr(example, "LanguageModel", lambda width, *rest, **named: wider(2 * width, *rest, **named))
    before = snapshot(copied)
    error = refused(example, capfd, *arguments(text, copied, "--resume"))
    assert "embedding" in error or "kernel" in error or "scale" in error
    assert "is float32[" in error
    assert "this program has it float32[" in error
    assert snapshot(copied) == before


def run_script(*args, cwd):
    env = os.environ | {
        # By default JAX takes most of a GPU for itself, and the process of these tests has done so.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # The package may not be installed, only in the folder where the tests run.
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, SCRIPT, *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_by_default_results_are_below_where_it_is_run(example, text, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = arguments(text, "runs/tiny_lm")
    assert example.main([part for part in options if part not in ("--out", "runs/tiny_lm")]) == 0
    captured = capfd.readouterr()
    assert "held out: " in captured.out
    assert (tmp_path / "runs/tiny_lm/loss.png").is_file()
    assert [line for line in captured.err.replace("\r", "\n").splitlines() if line.strip() and "/44 [" not in line] == []


def test_the_script_starts_in_silence(tmp_path):
    done = run_script("--steps", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == "importing JAX, Flax and what else is needed ...\n"
    assert done.stderr == "train_tiny_lm.py: error: argument --steps: '0' is not a positive integer\n"


@pytest.mark.slow
def test_command_line(text, tmp_path):
    shutil.copy(text, tmp_path / "own.txt")
    options = arguments("own.txt", "runs/tiny_lm", steps=3, sample_length=5)
    options = [part for part in options if part not in ("--out", "runs/tiny_lm")]  # the default, below where it is run
    done = run_script(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held out: " in done.stdout
    assert (tmp_path / "runs/tiny_lm/loss.png").is_file()
    noise = [line for line in done.stderr.replace("\r", "\n").splitlines() if line.strip() and "/3 [" not in line]
    assert noise == []


HANGS = 300  # seconds of silence, after which a script says nothing more on a busy machine either


@pytest.fixture
def importing(tmp_path):
    """The script while it imports a JAX that takes for ever."""
    (tmp_path / "slow" / "jax").mkdir(parents=True)
    slowly = "import time\ntry:\n    time.sleep(600)\nexcept BaseException:\n    time.sleep(600)\n"
    (tmp_path / "slow" / "jax" / "__init__.py").write_text(slowly)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "slow"), str(SCRIPT.parents[1])])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Where the tests run in the background of a shell they ignore Ctrl-C, and what they start would too.
    ignoring = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([sys.executable, SCRIPT], cwd=tmp_path, env=environment, text=True, **pipes)
    finally:
        signal.signal(signal.SIGINT, ignoring)
    with process:
        yield process
        process.kill()


def test_it_says_something_before_it_imports_and_stops_there_without_a_traceback(importing):
    ready, _, _ = select.select([importing.stdout], [], [], HANGS)
    assert ready
    assert "importing" in importing.stdout.readline()
    assert importing.poll() is None
    importing.send_signal(signal.SIGINT)
    assert importing.wait(HANGS) == 130
    assert importing.stderr.read() == "\ntrain_tiny_lm.py: interrupted\n"


@pytest.mark.slow
def test_default_run(tmp_path):
    done = run_script(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = results(tmp_path / "runs/tiny_lm")
    assert result["held_out_bits_per_byte"] < 2.5
    assert result["held_out_bits_per_byte"] < result["trigram_bits_per_byte"]
