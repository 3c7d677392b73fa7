"""The transformer-block example: the ways compute the same, costs and plot come out, and what does not fit is said."""

import contextlib
import csv
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer_block.py"
SMALL = {"--lengths": 16, "--width": 32, "--head-size": 16, "--batch": 2, "--dtype": "float32", "--seed": 3}
WAYS = ("jax", "softmax", "flash")
PASSES = ("forward", "forward+backward")
APIS = {"nnx": False, "linen": True}


pytestmark = pytest.mark.usefixtures("standard_promotion_all")  # Flax promotes


def arguments(out, *more, **changes):
    options = SMALL | {"--out": out} | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [str(part) for option in options.items() for part in option] + list(more)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(example, tmp_path_factory):
    """The directory of a run, and the lines that it printed."""
    out, printed = tmp_path_factory.mktemp("finished") / "run", io.StringIO()
    # A GPU has products of TF32 otherwise.
    with contextlib.redirect_stdout(printed), jax.default_matmul_precision("highest"):
        assert example.main(arguments(out)) == 0
    return out, printed.getvalue().splitlines()


def setting(example, api, dtype, width=64):
    return example.Setting(width=width, head_size=16, batch=2, dtype=dtype, linen=APIS[api], seed=1)


def assert_rounding(differences, dtype):
    """`differences` of one way are no larger than what rounding explains."""
    projections = [f"attention.{name}" for name in ("query", "key", "value", "out")]
    weights = [f"gradient of {name}.kernel" for name in (*projections, "hidden", "output")]
    scales = ["gradient of attention_norm.scale", "gradient of hidden_norm.scale"]
    assert sorted(differences) == sorted(["output", "gradient of the input", *weights, *scales])
    # About a dozen roundings after one another, in norms, products and residuals, and sums of up to 256 terms, of which the
    # roundings mostly cancel.
    assert 0 < max(differences.values()) < 16 * float(jnp.finfo(dtype).eps), differences


SLOW = (("nnx", "bfloat16"), ("linen", "float32"), ("linen", "float16"))
CASES = [("linen", "bfloat16"), *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]]


@pytest.mark.parametrize(("api", "dtype"), CASES)  # nnx in float32: what `finished` has written
def test_ways_differ_from_float64_by_rounding(example, api, dtype):
    with jax.default_matmul_precision("highest"):
        found = example.differences(setting(example, api, dtype), list(WAYS), 40)
    assert tuple(found) == WAYS
    for differences in found.values():
        assert_rounding(differences, dtype)


@pytest.mark.parametrize("api", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_ways_are_the_same_function(example, api, x64):
    """In float64, where rounding hides no difference; but nnx has a softmax in float32 of its own there."""
    wide = setting(example, api, "float64")
    operands = example.parameters(wide), *example.inputs(wide, 24)
    programs = {way: example.programs(wide, way)[PASSES[1]] for way in (*WAYS, "exact")}
    found = jax.jit(lambda *operands: {way: program(*operands) for way, program in programs.items()})(*operands)
    results = {way: example.named(own) for way, own in found.items()}
    for way in WAYS:
        eps = 2.0**-23 if (api, way) == ("nnx", "jax") else 2.0**-52
        for name, expected in results["exact"].items():
            atol = 32 * eps * np.abs(expected).max()
            np.testing.assert_allclose(results[way][name], expected, rtol=0, atol=atol, err_msg=f"{way}: {name}")


def test_no_token_sees_a_later_one(example):
    small = setting(example, "nnx", "float32", width=16)
    x, cotangent = example.inputs(small, 12)
    forward = jax.jit(example.programs(small, "exact")["forward"])
    params = example.parameters(small)
    outputs = [np.asarray(forward(params, x.at[:, 7].add(change), cotangent)) for change in (0.0, 1.0)]
    changed = (outputs[0] != outputs[1]).any((0, 2))
    np.testing.assert_array_equal(changed, np.arange(12) >= 7)


def test_parameters_and_inputs_follow_from_the_seed(example):
    first = setting(example, "linen", "float32", width=16)
    for make in (example.parameters, lambda setting: example.inputs(setting, 8)):
        one, same, other = (jax.tree.leaves(make(s)) for s in (first, first, first._replace(seed=2)))
        assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
        assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True) if a.ndim > 1)


def test_numbers_and_plot_come_out(finished):
    out, _ = finished
    assert {path.name for path in out.iterdir()} == {"cost.png", "cost.csv", "differences.csv"}
    costs = rows(out / "cost.csv")
    assert [(row["length"], row["way"], row["stage"]) for row in costs] == [("16", way, p) for way in WAYS for p in PASSES]
    assert all(float(row["milliseconds"]) > 0 for row in costs)
    memory = {(row["way"], row["stage"]): float(row["mebibytes"]) for row in costs}
    assert all(0 < memory[way, "forward"] < memory[way, "forward+backward"] for way in WAYS)
    differences = rows(out / "differences.csv")
    assert {row["way"] for row in differences} == set(WAYS)
    for way in WAYS:
        assert_rounding({row["result"]: float(row["difference"]) for row in differences if row["way"] == way}, "float32")
    assert matplotlib.image.imread(out / "cost.png").shape == (900, 1200, 4)


def test_prints_what_it_found(finished):
    out, printed = finished
    assert printed[0].startswith("nnx block of width 32, 2 heads of 16, batch 2, float32, on ")
    names = [line.split("  ")[0] for line in printed]
    for name in ("output", "gradient of the input", "gradient of attention.query.kernel", "epsilon of float32"):
        assert len([float(number) for number in printed[names.index(name)].removeprefix(name).split()]) == len(WAYS)
    for op in ("softmax", "softmax_jacobian", "dot_product_attention", "dot_product_attention_vjp"):
        assert any(line.startswith(f"  {op} ") and "->" in line for line in printed)
    lines = [line.split() for line in printed if line.startswith("16 ")]
    assert [line[1] for line in lines] == list(WAYS)
    written = [f"{float(row['milliseconds']):.3f}" for row in rows(out / "cost.csv")]
    assert [line[place] for line in lines for place in (2, 4)] == written
    assert printed[-1] == f"wrote cost.png, cost.csv and differences.csv to {out}"


@pytest.fixture
def too_large(example, monkeypatch):
    """Makes programs raise: `when(way, length)` is "compiled", "run" or None."""

    def set_up(when, message="RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."):
        makes, compiles = example.programs, example.compiled

        def programs(setting, way, *dtype):
            made = makes(setting, way, *dtype)
            for program in made.values():
                program.way = way
            return made

        def fails(*_):
            raise jax.errors.JaxRuntimeError(message)

        class Unfit:
            __call__ = fails

            def memory_analysis(self):
                return SimpleNamespace(peak_memory_in_bytes=2**37)

        def compiled(program, params, x, cotangent):
            raises = when(program.way, x.shape[1])
            if raises is None:
                return compiles(program, params, x, cotangent)
            if raises == "compiled":
                fails()
            return Unfit()

        monkeypatch.setattr(example, "programs", programs)
        monkeypatch.setattr(example, "compiled", compiled)

    return set_up


def test_out_of_memory_is_said_and_the_rest_goes_on(example, tmp_path, capfd, too_large):
    raises = {("softmax", 16): "run", ("softmax", 32): "compiled", ("flash", 32): "run"}
    too_large(lambda way, length: raises.get((way, length)))
    assert example.main(arguments(tmp_path, "--linen", "--only", "flash,softmax", lengths="32,16")) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    printed = captured.out.splitlines()
    (line,) = [line for line in printed if line.startswith("output ")]
    assert line.split()[1:4] == ["out", "of", "memory"]
    assert float(line.split()[4]) > 0
    lines = {tuple(line.split()[:2]): line.count("out of memory") for line in printed if line.startswith(("16 ", "32 "))}
    assert lines == {("16", "softmax"): 2, ("16", "flash"): 0, ("32", "softmax"): 2, ("32", "flash"): 2}
    for row in rows(tmp_path / "cost.csv"):
        error = raises.get((row["way"], int(row["length"])))
        assert (row["milliseconds"] == "") == (error is not None)
        assert (row["mebibytes"] == "") == (error == "compiled")
        if error == "run":
            assert float(row["mebibytes"]) == 2**17
    assert {row["way"] for row in rows(tmp_path / "differences.csv")} == {"flash"}
    assert (tmp_path / "cost.png").stat().st_size > 0


def test_draws_what_never_fits(example, tmp_path):
    for mebibytes in (None, 2.0**17):
        costs = [example.Cost(16, "jax", stage, None, mebibytes) for stage in PASSES]
        example.plot(tmp_path / "cost.png", costs, "title")
        assert matplotlib.image.imread(tmp_path / "cost.png").shape == (900, 1200, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["cost.png"]


def test_other_errors_are_not_hidden(example, tmp_path, too_large):
    too_large(lambda *_: "compiled", "INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        example.main(arguments(tmp_path))


def test_parameters_out_of_memory(example, tmp_path, capfd, monkeypatch):
    def fails(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")

    monkeypatch.setattr(example, "parameters", fails)
    assert example.main(arguments(tmp_path)) == 1
    assert capfd.readouterr().err == "transformer_block.py: error: out of memory before there was anything to measure\n"


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *[(f"--{name}", value, f"argument --{name}: {value!r} is not a positive integer")
          for name in ("width", "head-size", "batch") for value in ("0", "-1", "x", "1.5", "")],
        *[("--lengths", value, f"argument --lengths: {value!r} is not positive integers") for value in ("0", "16,", "8,x", "")],
        ("--seed", "-1", "argument --seed: '-1' is not an integer from 0 to 4294967295"),
        ("--seed", str(2**32), "argument --seed"),
        ("--dtype", "float64", "argument --dtype: invalid choice: 'float64' (choose from"),
        ("--only", "jax,torch", "argument --only: 'torch' is not one of jax, softmax, flash"),
        ("--only", "", "argument --only: '' is not one of"),
        ("--unknown", "1", "--unknown"),
        ("--head-size", "24", "argument --head-size: 24 is not a divisor of --width 32"),
        ("--out", str(SCRIPT), f"argument --out: {SCRIPT} is not a directory"),
        ("--out", str(SCRIPT / "below"), f"argument --out: {SCRIPT / 'below'} cannot be used: Not a directory"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(example, tmp_path, capfd, option, value, named):
    assert example.main([*arguments(tmp_path / "out"), f"{option}={value}"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("transformer_block.py: error: ")
    assert named in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_float16_in_nnx_on_a_cpu(example, tmp_path, capfd, monkeypatch):
    """JAX refuses Flax's own attention; the other ways run."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        half = setting(example, "nnx", "float16")
        operands = example.parameters(half), *example.inputs(half, 16)
        with pytest.raises(ValueError, match="not supported"):
            example.compiled(example.programs(half, "jax")["forward"], *operands)
        assert example.main(arguments(tmp_path, dtype="float16")) == 2
        assert "argument --dtype: float16 " in capfd.readouterr().err
        assert_rounding(example.differences(half, ["softmax"], 40)["softmax"], "float16")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--linen"]])
def test_default_run(tmp_path, more):
    # The package may not be installed, only in the folder where the tests run; and most of a GPU is taken by these tests.
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, SCRIPT, *more]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(rows(tmp_path / "runs/transformer_block/cost.csv")) == 3 * len(WAYS) * len(PASSES)


def test_without_a_cpu_float64_is_refused(example, tmp_path, capsys, monkeypatch):
    def local_devices(**_):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert example.main(arguments(tmp_path / "run")) == 2
    assert "float64 needs the CPU" in capsys.readouterr().err
