"""The GRPO example: it learns to sort, samples as it scores, resumes bit for bit, and turns bad input away untouched."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

from ..support import oracle
from ..support.runs import results, saved_arrays, snapshot

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_tiny.py"
# The last step is no multiple of anything, and printed lines and checkpoints fall on different steps.
SMALL = {
    "--steps": 64,
    "--batch": 128,
    "--digits": 2,
    "--width": 32,
    "--heads": 2,
    "--lr": 0.003,
    "--print-every": 12,
    "--checkpoint-every": 15,
}


# optax corrects Adam's bias with float ** int32, which strict promotion refuses.
pytestmark = pytest.mark.usefixtures("standard_promotion_all")


def arguments(out, *more, **changes):
    options = SMALL | {"--out": out} | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [str(part) for option in options.items() for part in option] + list(more)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(example):
    """Runs of the same settings share their compiled functions, as with JAX's cache of compiled programs."""
    made, runs = example.make_run, {}

    def make_run(args):
        run = made(args)
        first = runs.setdefault(tuple(getattr(args, name) for name in example.RECORDED), run)
        return first._replace(state=run.state)

    example.make_run = make_run
    yield
    example.make_run = made


@pytest.fixture(scope="module")
def finished(example, tmp_path_factory):
    """The directory of one uninterrupted run."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert example.main(arguments(out)) == 0
    return out


def parsed(example, out, **changes):
    args = example.parse_arguments(arguments(out, **changes))
    args.attention = "softmax"
    return args


def refused(example, capfd, *args):
    """The one line on standard error of a run that must be turned away."""
    capfd.readouterr()
    assert example.main(list(args)) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("grpo_tiny.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_learns_to_sort(finished):
    result = results(finished)
    history = {name: np.asarray(values) for name, values in result["history"].items()}
    assert {values.shape for values in history.values()} == {(64,)}
    assert history["reward"][:3].mean() < 0.25  # a digit by chance is right in one of 10 cases
    assert history["reward"][-5:].mean() > 0.7
    assert history["solved"][:3].mean() < 0.1
    assert result["solved"] > 0.5
    assert history["entropy"][0] > 0.6 * np.log(10)
    assert history["entropy"][-1] < 0.5 * history["entropy"][0]
    assert history["kl"][0] == pytest.approx(0, abs=1e-5)
    assert history["kl"][-1] > 0.5


def test_draws_the_curves(finished):
    picture = matplotlib.image.imread(finished / "learning.png")
    assert min(picture.shape[:2]) > 300
    assert picture[..., :3].std() > 0.05
    assert {path.name for path in finished.iterdir()} == {"checkpoints", "learning.png", "results.json"}


@pytest.mark.parametrize(("vocabulary", "last_layer"), [(10, "float32"), (1000, "float32"), (1000, "bfloat16")])
def test_samples_and_losses_have_the_same_log_probabilities(example, tmp_path, vocabulary, last_layer):
    args = parsed(example, tmp_path, vocabulary=vocabulary, last_layer=last_layer, temperature=0.7)
    run = example.make_run(args)
    problems = jax.random.randint(jax.random.key(1), (128, 2), 0, 10)
    answers, log_p = run.sample(run.state.params, problems, jax.random.key(2))
    assert answers.shape == log_p.shape == (128, 2)
    assert 0 <= answers.min() <= answers.max() < 10
    assert len(np.unique(answers)) == 10
    assert np.std(log_p) > 0.1  # there is something to compare
    scored, entropy = run.score(run.state.params, problems, answers)
    np.testing.assert_allclose(scored, log_p, rtol=0, atol=32 * oracle.EPS)  # chosen, not derived
    assert 0 < entropy.min() <= entropy.max() <= np.log(10) * (1 + oracle.EPS)


def test_unused_classes_change_nothing(example, tmp_path):
    """They are never drawn, and their columns of the last layer have no gradient."""
    args = parsed(example, tmp_path, vocabulary=1000)
    run = example.make_run(args)
    before = np.asarray(run.state.params["weight"][...])
    state = run.train(jax.tree.map(jnp.copy, run.state), run.state.params, 12)
    change = np.abs(np.asarray(state.params["weight"][...]) - before).max(0)
    assert change[:10].min() > 0
    assert change[10:].max() == 0
    assert np.asarray(state.history)[11, 0] > 1.3 * np.asarray(state.history)[0, 0]


@pytest.fixture
def interrupting(example, monkeypatch):
    """Presses Ctrl-C during the given call of the compiled steps."""
    made = example.make_run
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_in(call):
        calls = iter(range(1, 1000))

        def make_run(args):
            run = made(args)

            def train(state, reference, stop):
                if int(state.step) < stop and next(calls) == call:  # those of no steps only compile
                    signal.raise_signal(signal.SIGINT)
                return run.train(state, reference, stop)

            return run._replace(train=train)

        monkeypatch.setattr(example, "make_run", make_run)

    yield interrupt_in
    signal.signal(signal.SIGINT, previous)


def test_resumes_bit_for_bit(example, finished, tmp_path, capfd, interrupting):
    out = tmp_path / "run"
    # Calls of the steps end at 10, 12, 15, 20, ...; so 20 is where neither a line nor a checkpoint is due.
    interrupting(4)
    assert example.main(arguments(out)) == 130
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "grpo_tiny.py: interrupted after step 20; --resume continues from there"
    assert not (out / "results.json").exists()
    assert int(saved_arrays(out)["step"]) == 20
    interrupting(0)
    assert example.main(arguments(out, "--resume", print_every=7)) == 0
    one, other = results(finished), results(out)
    assert one.pop("answers_per_second") > 0
    assert other.pop("answers_per_second") > 0
    assert one == other
    arrays, others = saved_arrays(finished), saved_arrays(out)
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name, strict=True)
    assert (out / "learning.png").read_bytes() == (finished / "learning.png").read_bytes()


def test_resuming_another_run_or_none_is_refused(example, finished, tmp_path, capfd):
    before = snapshot(finished)
    error = refused(example, capfd, *arguments(finished, "--resume", seed=7, clip=0.3))
    assert "seed was 0, now 7" in error
    assert "clip was 0.2, now 0.3" in error
    assert "steps was 64, now 65" in refused(example, capfd, *arguments(finished, "--resume", steps=65))
    assert snapshot(finished) == before
    assert f"no checkpoint in {tmp_path / 'none'}" in refused(example, capfd, *arguments(tmp_path / "none", "--resume"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *[(f"--{name}", "0", f"--{name}") for name in ("steps", "batch", "digits", "updates", "lr", "temperature", "clip")],
        ("--kl-weight", "-1", "--kl-weight"),
        ("--seed", "-1", "--seed"),
        ("--group", "1", "--group 1 does not divide --batch 128 into groups of 2 or more"),
        ("--group", "7", "--group 7 does not divide --batch 128"),
        ("--heads", "3", "--heads 3 does not divide --width 32"),
        ("--vocabulary", "9", "--vocabulary 9 is less than 10"),
        ("--unknown", "1", "--unknown"),
    ],
)
def test_bad_options_are_refused(example, tmp_path, capfd, option, value, named):
    assert named in refused(example, capfd, *arguments(tmp_path / "out"), option, value)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_may_be_zero(example):
    assert example.parse_arguments(["--kl-weight", "0"]).kl_weight == 0


def test_divergence_is_an_error(example, tmp_path, capfd, monkeypatch):
    made = example.make_run

    def make_run(args):
        def train(state, reference, stop):
            history = state.history.at[int(state.step) : stop].set(np.nan if stop > 12 else 1)
            return state._replace(step=np.int32(stop), history=history)

        return made(args)._replace(train=train)

    monkeypatch.setattr(example, "make_run", make_run)
    assert example.main(arguments(tmp_path / "run")) == 1
    assert "grpo_tiny.py: error: not finite at step 15: reward nan" in capfd.readouterr().err.splitlines()[-1]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_the_script_starts_in_silence(tmp_path):
    # The package may not be installed, only in the folder where the tests run.
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    command = [sys.executable, SCRIPT, "--steps", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stdout == "importing JAX, Flax and what else is needed ...\n"
    assert done.stderr == "grpo_tiny.py: error: argument --steps: '0' is not a positive integer\n"
