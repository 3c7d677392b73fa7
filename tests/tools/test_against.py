"""Two checkouts beside each other: what is measured by turns, what is left out, and what is said of it."""

import csv
import dataclasses
import re

import pytest

from benchmarks import against, harness, reference, sustained
from benchmarks.__main__ import main

CHANGED = """

def softmax(x, *args, like=softmax, **options):  # slower
    import jax
    late = jax.lax.fori_loop(0, 100_000, lambda i, t: jax.numpy.cos(t), x[0, 0])
    return like(x + late * 0, *args, **options)


def log_softmax(x, *args, like=log_softmax, **options):  # of other bits
    return like(x, *args, **options) * (1 + 2**-23)


del logsumexp
"""


@pytest.fixture
def other(tmp_path):
    """A checkout whose softmax is slower, whose log_softmax has other bits, and which has no logsumexp; all else is ours."""
    own = harness.ROOT / "jaxsoftmax"
    package = tmp_path / "other" / "jaxsoftmax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__ = [{str(own)!r}]\n{(own / '__init__.py').read_text()}{CHANGED}")
    return package.parent


def test_two_checkouts_are_measured_by_turns(tmp_path, other, capfd, monkeypatch):
    monkeypatch.setattr(reference, "ON_A_CPU", harness.Effort(rounds=2, calls=1, cache=0, turn=1e-3))
    path, names = tmp_path / "rows.csv", [f"{op} forward float32 1x100" for op in ("softmax", "log_softmax", "logsumexp")]
    asked = ["reference", "--only", f"^({'|'.join(names)})$", "--against", str(other), "--csv", str(path)]
    assert main([*asked, "--out", str(tmp_path / "results")]) == 0
    out = capfd.readouterr().out
    with path.open() as file:
        slower, of_other_bits = csv.DictReader(file)
    assert [slower["cell"], of_other_bits["cell"]] == names[:2]
    assert (slower["bits"], of_other_bits["bits"]) == ("same", "differ")
    assert float(slower["least"]) <= float(slower["largest"]) < 0.5
    assert {slower[f"implementation_{side}"] for side in ("here", "there")} == {"xla"}
    assert (slower["commit_here"], slower["commit_there"]) == (harness.commit() or "unknown", "unknown")
    assert f"there: {other}, commit unknown" in out
    assert "2 cells, 1 left out; geometric mean of the ratios 0." in out
    # Rounds of microseconds may differ by chance, so that the other cell is among these too.
    _, faster = re.split(r"faster here, below 0.98 in every round: [12]\n", out)
    (ratio,) = re.findall(rf"^  {names[0]}: ([\d.]+) \(", faster)
    assert float(ratio) == pytest.approx(float(slower["ratio"]), abs=1e-3)  # the file has one digit more
    reason = f"{names[2]}: there, AttributeError: module 'jaxsoftmax' has no attribute 'logsumexp'"
    assert out.splitlines()[-1] == f"left out: {reason}"
    assert not (tmp_path / "results").exists()


def test_a_process_that_ends(other, capfd):
    package = other / "jaxsoftmax" / "__init__.py"
    package.write_text("raise SystemExit(3)")
    with (
        against.Side("there", other, "") as side,
        pytest.raises(ValueError, match=f"{other} ended with status 3 as it started"),
    ):
        side.ask("turn")
    package.write_text("print('ready', flush=True); input(); raise SystemExit(4)")
    with against.Side("there", other, "") as side:
        for _ in range(2):  # it is started again
            side.ask("turn")
            assert side.answer() == {"left_out": "its process ended with status 4", "is_wrong": True}


def test_ratios_are_of_medians_and_of_rounds():
    assert against.ratios([2.0, 4.0, 9.0], [1.0, 4.0, 3.0]) == (4 / 3, 1.0, 3.0)


def a_row(cell, ratio, least, largest):
    names = dataclasses.fields(against.Row)[7:]
    times = {"here_us": ratio, "there_us": 1.0, "ratio": ratio, "least": least, "largest": largest}
    return against.Row(cell, **times, bits="same", **{field.name: "abc" for field in names})


def test_turns_that_warm_the_gpu_up_do_not_count():
    class Side:
        commit = "abc"

        def __init__(self, name, times):
            self.name, self.steps, self.answers = name, [], [{"bits": "1", "implementation": "mosaic"}, *times]

        def ask(self, step, **more):
            self.steps.append(step)

        def answer(self):
            return self.answers.pop(0)

    sides = [Side(name, [{"us": us} for us in (None, 1e9, 10 * us, 30 * us)]) for name, us in (("here", 1.0), ("there", 2.0))]
    row = against._row(sustained.cells()[0], sides, "NVIDIA H200", sustained.effort(2.0))
    assert [side.steps for side in sides] == [["enter", *["turn"] * 4]] * 2
    assert (row.here_us, row.there_us, row.ratio) == (20.0, 40.0, 0.5)


def test_a_cell_is_slower_or_faster_where_every_round_is():
    rows = [
        a_row("slower", 2.0, 1.03, 3.0),
        a_row("slower but for a round", 2.0, 1.01, 3.0),
        a_row("faster", 0.5, 0.2, 0.97),
        a_row("faster but for a round", 0.5, 0.2, 0.99),
    ]
    assert against.Comparison(rows, ["another: it fails"]).summary().splitlines() == [
        "4 cells, 1 left out; geometric mean of the ratios 1.000",
        "slower here, above 1.02 in every round: 1",
        "  slower: 2.000 (1.030 to 3.000)",
        "faster here, below 0.98 in every round: 1",
        "  faster: 0.500 (0.200 to 0.970)",
        "left out: another: it fails",
    ]
    assert against.Comparison().summary() == "0 cells, 0 left out"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["softmax", "--against", "no-such-place"], "--against: 'no-such-place' is no checkout: it must be a directory"),
        (["softmax", "--against", "HERE", "--check"], "--check: not allowed with argument --against"),
        (["softmax", "--against", "HERE", "--plot"], "--plot: not allowed with argument --against"),
        (["softmax", "--against", "HERE", "--peers", "jax.nn"], "--peers: has no meaning with --against"),
        (["softmax", "--against", "HERE", "--commit", "abc"], "--commit: has no meaning with --against"),
        (["first_call", "--against", "HERE"], "--against: first_call starts a process for each measurement"),
        (["links", "--against", "HERE"], "--against: links measures nothing of ours"),
        (["softmax", "--csv", "rows.csv"], "--csv: has no meaning here"),
        (["--against", "HERE"], "suite: choose from softmax"),
    ],
)
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(harness.ROOT) if argument == "HERE" else argument for argument in arguments])
    assert end.value.code == 2
    assert f"argument {said}" in capsys.readouterr().err


def test_a_file_that_is_there_is_not_overwritten(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("kept")
    asked = ["reference", "--only", "^softmax forward float32 1x100$", "--against", str(harness.ROOT), "--csv", str(path)]
    assert main(asked) == 2
    assert "File exists" in capsys.readouterr().err
    assert path.read_text() == "kept"
