"""`python -m jaxsoftmax`: what it reports, that it sees wrong values, and that it leaves no half-written file."""

import ast
import ctypes
import functools
import io
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from benchmarks import __main__ as benchmarks
from benchmarks import results
from jaxsoftmax import __main__ as command
from jaxsoftmax import explain
from jaxsoftmax._report import bench, call, cases, check, clock, installed, progress, truth

from ..support import kernels
from ..support.cases import quick
from ..support.clocks import wall_clock

PACKAGE = Path(jaxsoftmax.__file__).parent
WITHOUT_TRITON = pytest.mark.skipif(installed.version("jax-triton") is not None, reason="says what lacks without jax-triton")


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch, tmp_path):
    """Promotes dtypes as users' programs do, in all threads, sees no GPU, and works in an empty folder."""
    before = jax.config.jax_numpy_dtype_promotion, jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    monkeypatch.setattr(call, "gpu", lambda: None)
    monkeypatch.chdir(tmp_path)
    yield
    jax.config.update("jax_numpy_dtype_promotion", before[0])
    jax.config.update("jax_numpy_rank_promotion", before[1])


# The report.


def assert_is_short(report, most=10):
    lines = report.splitlines()
    assert len(lines) <= most, report
    assert max(map(len, lines)) <= 100, report


def test_the_report_says_what_is_installed_and_what_runs(capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert_is_short(text)
    assert text.startswith(f"jaxsoftmax  {jaxsoftmax.__version__}, jax {jax.__version__}, jaxlib ")
    assert "; JAX uses cpu\nOn cpu calls in bfloat16 run on\n" in text
    assert text.endswith("not mosaic or triton: it runs on cuda, not on cpu\n")
    assert set(installed.standard_calls()) == {*(case.op for case in cases.all_cases()), "decoding"}
    for name in installed.standard_calls():
        assert name in text, name


@WITHOUT_TRITON
def test_the_report_for_another_gpu_says_what_to_install(capsys):
    assert command.main(["--gpu", "a100"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "On A100 (compute capability 8.0, 108 multiprocessors) calls in bfloat16 run on xla" in text
    assert re.search(r"not triton: it needs jax-triton.*: pip install", text)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_report_is_short_on_hopper(monkeypatch, count):
    """Every standard call runs a kernel; a host with GPUs has longer lines of versions, and a line for each GPU."""
    name = "NVIDIA H100 80GB HBM3"
    if count:
        wheels = "runtime 13.0.96, nvcc 13.0.88, cupti 13.0.85, cudnn 9.15.1.9, cublas 13.1.0.3, nccl 2.28.7"
        monkeypatch.setattr(installed, "_cuda", lambda: wheels)
        monkeypatch.setattr(ctypes, "CDLL", lambda library: FakeNvml(name=name.encode(), count=count))
        monkeypatch.setattr(call, "gpu", lambda: types.SimpleNamespace(device_kind=name, compute_capability="9.0"))
        monkeypatch.setattr(installed, "version", lambda package: "0.11.2")
    with kernels.hollow():
        text = installed.report("h100")
    assert_is_short(text, 11 + max(count - 1, 0))
    assert text.count("mosaic") == 1
    assert "not mosaic" not in text
    assert "On H100 (compute capability 9.0, 132 multiprocessors) calls in bfloat16 run on\n" in text
    assert text.count("the default device of JAX") == min(count, 1)


def test_the_gpu_of_jax_is_marked(monkeypatch):
    name = "NVIDIA A100-SXM4-80GB"
    monkeypatch.setattr(ctypes, "CDLL", lambda library: FakeNvml(count=3))
    monkeypatch.setattr(call, "gpu", lambda: types.SimpleNamespace(device_kind=name, compute_capability="8.0"))
    for visible, expected in ((None, "GPU 0"), ("2,1", "GPU 2"), ("GPU-8932f937-4106", "JAX uses"), ("7", "JAX uses")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        marked = [label for label, text in installed._installed("gpu") if label == "JAX uses" or "default" in text]
        assert marked == [expected], visible


@pytest.mark.parametrize("option", [None, "--check", "--bench"])
def test_a_platform_that_jax_cannot_use_is_said_in_one_line(monkeypatch, capsys, option):
    def fails():
        raise RuntimeError("Unable to initialize backend 'cuda': no device\nand more")

    monkeypatch.setattr(jax, "default_backend", fails)
    monkeypatch.setattr(check, "main", None)
    monkeypatch.setattr(bench, "main", None)
    assert command.main([option] if option else []) == (1 if option else 0)
    *report, last = capsys.readouterr().out.splitlines()
    assert last.startswith("JAX cannot use the platform that it was told to use, ")
    assert last.endswith(": Unable to initialize backend 'cuda': no device")
    assert [line.split()[0] for line in report] == ["jaxsoftmax", "CUDA", "Triton", "Python", "driver"]


def test_a_platform_without_a_plugin_is_said_too():
    done = subprocess.run(
        [sys.executable, "-m", "jaxsoftmax", "--check"],
        env={**os.environ, "JAX_PLATFORMS": "nonsense"},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "told to use, 'nonsense': Unable to initialize backend" in done.stdout.splitlines()[-1]


class FakeNvml:
    """Answers as NVML does on a host with A100s, or other GPUs."""

    def __init__(self, status=0, name=b"NVIDIA A100-SXM4-80GB", count=1):
        self.status, self.name, self.count, self.is_shut_down = status, name, count, False

    def __getattr__(self, name):
        def answer(*args):
            match name, args:
                case "nvmlSystemGetDriverVersion", (text, _):
                    text.value = b"580.65.06"
                case "nvmlSystemGetCudaDriverVersion_v2", (number,):
                    number._obj.value = 13000
                case "nvmlDeviceGetCount_v2", (number,):
                    number._obj.value = self.count
                case "nvmlDeviceGetName", (_, text, _):
                    text.value = self.name
                case "nvmlDeviceGetMemoryInfo", (_, memory):
                    memory._obj[0] = 80 << 30
                case "nvmlDeviceGetCudaComputeCapability", (_, major, minor):
                    major._obj.value, minor._obj.value = 8, 0
                case "nvmlShutdown", _:
                    self.is_shut_down = True
            return self.status

        return answer


def test_the_driver_is_asked_for_gpus(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    driver, (gpu,) = installed.nvidia()
    assert driver == "580.65.06, which runs CUDA up to 13.0"
    assert gpu == ("NVIDIA A100-SXM4-80GB", "compute capability 8.0, 80 GiB")
    assert nvml.is_shut_down
    text = installed.report()
    assert "GPU 0       NVIDIA A100-SXM4-80GB" in text
    assert "pip install 'jax[cuda13]'" in text


def test_a_host_without_a_driver_has_no_gpus(monkeypatch):
    def missing(name):
        raise OSError

    for library in (missing, lambda name: FakeNvml(status=9)):  # the second without a driver
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert installed.nvidia() == ("no NVIDIA driver", [])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--csv", "x.csv"], "argument --csv: needs --bench"),
        (["--bench", "--csv", "missing/x.csv"], "argument --csv: missing/x.csv must be a file in a folder that exists"),
        (["--implementation", "xla"], "argument --implementation: needs --check or --bench"),
        (["--check", "--implementation", "cuda"], "argument --implementation: invalid choice: 'cuda'"),
        (["--check", "--gpu", "a100"], "argument --gpu: is for the report alone"),
        (["--gpu", "a1000"], "argument --gpu: explain: gpu must be one of"),
        (["check"], "unrecognized arguments: check"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_refused(argv, words, capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(argv)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_importing_the_library_loads_nothing_of_the_command():
    script = "import jaxsoftmax, sys; print(*[name for name in sys.modules if name.startswith('jaxsoftmax._report')])"
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "\n"


def test_the_command_needs_nothing_but_jax():
    allowed = {*sys.stdlib_module_names, "jax", "jaxsoftmax", "ml_dtypes", "numpy"}
    for path in (PACKAGE / "__main__.py", *PACKAGE.glob("_report/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, path
                assert node.module.split(".")[0] in allowed, path


# The check.


def test_without_a_gpu_the_reference_is_checked(capsys):
    assert command.main(["--check"]) == 0
    out, err = capsys.readouterr()
    assert "JAX sees no NVIDIA GPU (cpu): a few cases check the reference, and no kernel runs." in out
    names = [case.name for case in cases.few_cases()]
    assert {case.op for case in cases.few_cases()} >= {"softmax", "dot_product_attention", "paged_attention", "categorical"}
    rows = re.findall(r"^(.{64}) xla +([\d.e-]+) ok$", out, re.MULTILINE)
    assert [name.rstrip() for name, _ in rows] == names
    assert all(float(error) <= 1 for _, error in rows)
    assert out.endswith(f"\n{len(names)} cases: {len(names)} ok; 0 ran a kernel\n")
    assert err.count("\n") == len(names)  # no bar, as this is no terminal


def test_a_wrong_value_is_seen(monkeypatch, capsys):
    right = jaxsoftmax.softmax

    def raises(*args, **options):
        raise RuntimeError("ptxas died\nand more")

    monkeypatch.setattr(jaxsoftmax, "softmax", lambda x, **options: right(x, **options) * jnp.asarray(1.001, x.dtype))
    monkeypatch.setattr(jaxsoftmax, "top_k", raises)
    kept = [case for case in cases.few_cases() if case.op in ("softmax", "top_k", "logsumexp")]
    monkeypatch.setattr(check, "few_cases", lambda: kept)
    assert command.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "  raised    top_k\n" in out
    assert re.search(r"^softmax float32 64x1024 .* WRONG$", out, re.MULTILINE)
    assert re.search(r"^top_k float32 64x1000 k=8 .* raised$", out, re.MULTILINE)
    assert "\n  RuntimeError: ptxas died\n" in out
    assert "3 cases: 1 ok, 1 WRONG, 1 raised; 0 ran a kernel" in out


@pytest.mark.parametrize("change", ["nan", "gradient", "index"])
def test_every_result_of_a_case_counts(change):
    """A result that is NaN, a wrong derivative and a wrong index use more than the tolerance."""
    case = next(case for case in cases.few_cases() if case.op == "softmax_top_k")
    given = case.inputs()
    results = [np.array(result) for result in jax.jit(case.build(None))(given)]

    def largest():
        return max(cases.error(judge, result) for judge, result in zip(case.judges({}, given), results, strict=True))

    assert largest() <= 1
    match change:
        case "nan":
            results[0][3, 2] = np.nan
        case "gradient":
            results[2][5] *= 1.0001
        case "index":
            results[1][4, 1] += 1
    assert largest() > 1


def test_an_implementation_that_cannot_run_is_refused_with_its_reason(monkeypatch, capsys):
    monkeypatch.setattr(check, "few_cases", lambda: cases.all_cases()[:1])
    assert command.main(["--check", "--implementation", "mosaic"]) == 0
    out = capsys.readouterr().out
    assert "softmax: implementation='mosaic' cannot run: it runs on cuda, not on cpu" in out
    assert "1 cases: 1 refused; 0 ran a kernel" in out


def test_an_implementation_that_an_op_does_not_have_is_refused():
    (refused,) = check.run([next(case for case in cases.all_cases() if case.op == "top_k")], "triton", on_gpu=True)
    assert (refused.status, refused.implementation) == ("refused", "-")
    assert refused.reasons == ("top_k: implementation must be None or one of 'mosaic', 'xla', got 'triton'",)


def test_what_jax_cannot_lower_is_no_refusal():
    """A kernel that a newer JAX does not lower, for example, has to be seen."""
    unknown = jax.extend.core.Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    refused = functools.partial(jaxsoftmax.softmax, implementation="mosaic")
    for function, is_refusal in ((refused, True), (unknown.bind, False), (lambda x: unknown.bind(refused(x)), True)):
        with pytest.raises(NotImplementedError) as error:
            call.compiled(function, jnp.ones((2, 4)))
        assert call.is_refusal(error.value) == is_refusal
    assert not call.is_refusal(NotImplementedError("softmax: implementation='mosaic' cannot run: it was not raised"))


@pytest.mark.parametrize("path", [".", "/dev/null", "nowhere/x.csv"])
def test_a_result_file_is_a_file(path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--bench", "--csv", path])
    assert f"argument --csv: {path} must be a file in a folder that exists" in capsys.readouterr().err


def test_on_a_gpu_a_case_that_no_kernel_runs_is_refused_with_the_reasons():
    (refused,) = check.run(cases.all_cases()[:1], on_gpu=True)
    assert (refused.status, refused.implementation) == ("refused", "xla")
    assert refused.error <= 1
    assert any("not mosaic: it runs on cuda, not on cpu" in reason for reason in refused.reasons)
    assert "1 cases: 1 refused; 0 ran a kernel" in check.table([refused])


def test_on_a_gpu_the_reference_that_was_asked_for_is_no_refusal():
    (outcome,) = check.run(cases.all_cases()[:1], "xla", on_gpu=True)
    assert (outcome.status, outcome.implementation, outcome.reasons) == ("ok", "xla", ())


def test_an_interrupted_check_waits_for_no_queued_compilation(monkeypatch):
    begun = []

    def compiled(case, implementation):
        begun.append(case)
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "_compiled", compiled)
    with pytest.raises(KeyboardInterrupt):
        check.run(cases.all_cases(), on_gpu=False)
    assert len(begun) <= 3 * check._THREADS


REFUSED = {  # cases that run on the reference on an H100, and why
    "softmax bfloat16 37x1 one column": "XLA computes rows of one entry element by element",
}


def test_cases_have_names_of_their_own_and_every_dtype():
    names = [case.name for case in cases.all_cases()]
    assert len(set(names)) == len(names)
    assert 40 <= len(names) <= 70
    assert max(map(len, names)) <= check._NAME
    for op in {case.op for case in cases.all_cases()} - {"paged_attention"}:
        assert {case.dtype for case in cases.all_cases() if case.op == op} == {"float32", "bfloat16", "float16"}, op


@pytest.mark.parametrize("third", quick(0, slow=(1, 2)))
def test_cases_run_kernels_on_hopper_or_say_why_not(third):
    for case in cases.all_cases()[third::3]:
        with kernels.hollow():
            decisions = explain(case.build(None), case.inputs(), gpu="h100")
        assert len(decisions) > 0
        for decision in decisions:
            key = case.name if case.name in REFUSED else f"{decision.primitive} {case.dtype}"
            if key in REFUSED:
                assert dict(decision.refusals)["mosaic"] == REFUSED[key], case.name
            else:
                assert decision.implementation == "mosaic", (case.name, str(decisions))


@WITHOUT_TRITON
def test_without_triton_an_a100_runs_the_reference_and_says_why():
    for case in cases.few_cases():
        decisions = explain(case.build(None), case.inputs(), gpu="a100")
        assert {decision.implementation for decision in decisions} == {"xla"}
        for decision in decisions:
            reasons = dict(decision.refusals)
            assert reasons["mosaic"].startswith("it needs compute capability 9.x"), case.name
            # Triton has kernels for what a linear layer's losses consist of, which are decided behind them.
            lacks_kernel = f"it has no kernel for {decision.primitive}" if decision.primitive.startswith("linear_") else None
            assert "triton" not in reasons or "pip install" in reasons["triton"] or reasons["triton"] == lacks_kernel, case.name


def test_the_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, is_terminal in ((Terminal(), True), (io.StringIO(), False)):
        shown = progress.Progress(2, stream)
        shown.step("softmax", "ok")
        shown.step("top_k", "WRONG")
        shown.end()
        text = stream.getvalue()
        assert ("\n" not in text) == is_terminal
        assert ("\r" in text) == is_terminal
        assert "2/2" in text
        assert ("top_k: WRONG\n" in text) != is_terminal
    monkeypatch.setenv("COLUMNS", "30")
    narrow = Terminal()
    progress.Progress(2, narrow).step("softmax", "ok")
    assert len(narrow.getvalue()) == len("\r") + 29


# The benchmark.

bench_clock = bench.kernel_clock
SMALL = bench.all_cells(shrink=1024)


def few_cells(*ops):
    return [cell for cell in SMALL if cell.op in ops]


@pytest.fixture
def measured(monkeypatch):
    """Measures a few small cells on the wall clock, as if the CPU were a GPU."""
    device = types.SimpleNamespace(device_kind="NVIDIA Test 1", compute_capability="8.0")
    monkeypatch.setattr(call, "gpu", lambda: device)
    monkeypatch.setattr(bench, "kernel_clock", wall_clock)
    monkeypatch.setattr(bench, "_CACHE", 1)
    monkeypatch.setattr(bench, "_ROUNDS", 2)
    cells = few_cells("copy", "logsumexp", "top_k")
    monkeypatch.setattr(bench, "all_cells", lambda: cells)


def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    assert command.main(["--bench"]) == 0
    assert "JAX sees no NVIDIA GPU (cpu): nothing to measure, and no file." in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_one_of_the_benchmarks(measured, tmp_path, capsys):
    assert command.main(["--bench"]) == 0
    out = capsys.readouterr().out
    assert "| call | runs on | us |" in out
    (path,) = tmp_path.iterdir()
    assert path.name == "jaxsoftmax_test-1.csv"
    assert f"rows are in {path.name}, which may be sent as it is." in out
    rows = results.read(path)
    assert [row.op for row in rows] == ["copy", "logsumexp", "logsumexp", "top_k", "top_k"]
    assert [row.implementation for row in rows] == ["copy", "xla", "jax.nn", "xla", "jax"]
    assert {row.gpu for row in rows} == {"NVIDIA Test 1"}
    assert all(row.least_us <= row.us for row in rows)
    assert all((row.error is None) == (row.op == "copy") for row in rows)
    assert rows == results.newest_of_each_cell(rows)
    folder = tmp_path / "results" / "test-1"
    folder.mkdir(parents=True)
    path.rename(folder / "softmax.csv")
    assert benchmarks.main(["softmax", "--check", "--gpu", "test-1", "--out", str(folder.parent)]) == 1
    assert "bars missed" in capsys.readouterr().out
    assert benchmarks.main(["softmax", "--plot", "--gpu", "test-1", "--out", str(folder.parent)]) == 0


def test_a_wrong_value_is_not_timed(measured, monkeypatch, tmp_path, capsys):
    right = jaxsoftmax.logsumexp
    monkeypatch.setattr(jaxsoftmax, "logsumexp", lambda *args, **options: right(*args, **options) + 0.01)
    assert command.main(["--bench", "--csv", "own.csv"]) == 1
    assert "logsumexp forward float32 32x4096: WRONG: its error is" in capsys.readouterr().out
    rows = results.read(tmp_path / "own.csv")
    assert [row.implementation for row in rows if row.op == "logsumexp"] == ["jax.nn"]


def test_a_write_that_fails_leaves_what_was_there(measured, monkeypatch, tmp_path, capsys):
    def fails(*args):
        raise OSError("No space left on device")

    (tmp_path / "own.csv").write_text("before\n")
    for owner, name in ((bench.os, "replace"), (bench.os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with pytest.raises(OSError, match="No space left"):
                bench.write(tmp_path / "own.csv", [])
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("own.csv", "before\n")]
    monkeypatch.setattr(bench, "all_cells", lambda: few_cells("copy")[:1])
    monkeypatch.setattr(bench.os, "replace", fails)
    assert command.main(["--bench", "--csv", "own.csv"]) == 1
    assert "own.csv was not written: No space left on device" in capsys.readouterr().out


def test_a_gpu_without_cupti_says_so_and_writes_nothing(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "kernel_clock", bench_clock)
    monkeypatch.setattr(bench, "all_cells", lambda: few_cells("copy")[:1])
    assert command.main(["--bench"]) == 1
    out = capsys.readouterr().out
    assert "CUPTI is missing: JAX's plugin for CUDA brings it" in out
    assert "nothing was measured, and no file was written" in out
    assert list(tmp_path.iterdir()) == []


def test_cells_are_those_of_the_benchmarks():
    suites = ("softmax", "attention", "attention_gradients", "decoding", "cross_entropy", "top_k")
    every = [cell for suite in suites for cell in benchmarks.SUITES[suite]()]
    known = {(cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options): cell for cell in every}
    for cell in bench.all_cells():
        same = known[cell.key]
        assert (cell.bytes, cell.flops) == (same.bytes, same.flops), cell.name


@pytest.mark.parametrize("op", ["softmax", "cross_entropy", "attention", "decoding", "softmax_top_k", "categorical"])
def test_every_cell_is_right_on_the_reference(monkeypatch, capsys, op):
    monkeypatch.setattr(bench, "kernel_clock", wall_clock)
    monkeypatch.setattr(bench, "_CACHE", 1)
    monkeypatch.setattr(bench, "_ROUNDS", 1)
    monkeypatch.setattr(bench, "_CALLS", 1)
    run = bench.Run("test", None)
    cells = few_cells("copy", op)
    run.measure(cells)
    assert not run.is_wrong, capsys.readouterr().out
    assert {row.cell for row in run.rows} == {cell.key for cell in cells}
    assert all(row.error <= 1 for row in run.rows if row.error is not None and bench.is_ours(row))
    assert len(bench.table(run.rows).splitlines()) == 2 + len(cells)


def test_the_tolerances_are_those_of_the_tests():
    from ..support import oracle

    assert oracle.softmax is truth.softmax
    assert oracle.error is truth.error


def test_the_clock_divides_by_the_calls_and_refuses_uneven_ones():
    detached = []

    def cupti(count):
        timings = [("kernel", 0.5)] * count
        return types.SimpleNamespace(
            _cupti_init=lambda: None, _cupti_get_timings=lambda detach: detached.append(detach) or timings
        )

    assert clock.kernels_us(cupti(4), lambda: None, 2) == 1000
    assert clock.kernels_us(cupti(0), lambda: None, 2, detach=True) is None
    assert detached == [False, True]
    with pytest.raises(RuntimeError, match="2 calls ran 3 kernels"):
        clock.kernels_us(cupti(3), lambda: None, 2)
