"""Hardware counters by Nsight Compute: its CSV, metrics that it does not know, and the table."""

import subprocess
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import counters, harness, sustained
from benchmarks.cells import OURS, Contender

FORWARD = "attention forward bfloat16 4x4096x16x128 causal=1"
FA3 = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::MainloopFwdSm90<2>>>>(T1::Params)"
CYCLES, INSTRUCTIONS, TIME = "sm__cycles_elapsed.max", "sm__inst_executed.sum", "gpu__time_duration.sum"
GMMA = "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_elapsed"


def csv_of(*kernels):
    """Writes kernels as ncu does, each a name and texts of its metrics."""
    columns = "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC,Section Name"
    header = [*columns.split(","), "Metric Name", "Metric Unit", "Metric Value"]
    rows = [header]
    for number, (name, metrics) in enumerate(kernels):
        of_kernel = [str(number), "7", "python", "127.0.0.1", name, "1", "13", "(384, 1, 1)", "(132, 1, 1)", "0", "9.0"]
        rows += [[*of_kernel, "Command line profiler metrics", metric, "", value] for metric, value in metrics.items()]
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 7 (/usr/bin/python)", *lines, "==PROF== Disconnected from process 7", ""])


def test_kernels_are_read_in_order_and_what_is_not_counted_is_left_out():
    text = csv_of(
        ("attention_forward_mosaic", {CYCLES: "689,012", TIME: "422,112.5", GMMA: "n/a"}),
        (FA3, {CYCLES: "1.5e+06"}),
        ("attention_forward_mosaic", {CYCLES: "5"}),
    )
    assert counters.parse(text) == [
        counters.Kernel("attention_forward_mosaic", {CYCLES: 689012.0, TIME: 422112.5}),
        counters.Kernel("FlashAttnFwdSm90", {CYCLES: 1.5e6}),
        counters.Kernel("attention_forward_mosaic", {CYCLES: 5.0}),
    ]
    assert counters.parse("==ERROR== The application returned an error code (1).\n") == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (FA3, "FlashAttnFwdSm90"),
        ("attention_vjp_mosaic", "attention_vjp_mosaic"),
        ("void at::native::reduce(float *, int)", "reduce"),
        ("void flash_sdpa<float, 4>(float *)", "flash_sdpa"),
        ("cudnn_generated_fort_native_sdpa_sm90", "cudnn_generated_fort_native_sdpa_sm90"),
    ],
)
def test_names_of_kernels_are_short(name, short):
    assert counters.short(name) == short


@pytest.fixture
def ncu(monkeypatch):
    """Stands for `ncu`, which knows `metrics`, lists them if it `lists` any, and counts the kernels that it is told."""
    state = types.SimpleNamespace(metrics=set(counters.METRICS), lists=True, kernels={}, commands=[])

    def run(command, **options):
        del options
        if command[1:] == ["--query-metrics"]:
            lines = [f"{metric.partition('.')[0]:80} Counter # of something" for metric in sorted(state.metrics)]
            return types.SimpleNamespace(stdout="\n".join(["Device NVIDIA H100 (GH100)", *lines]) if state.lists else "")
        state.commands.append(command)
        asked = command[command.index("--metrics") + 1].split(",")
        unknown = [metric for metric in asked if metric not in state.metrics]
        text = csv_of(*state.kernels[command[-1]]) if not unknown else ""
        if unknown:
            text = f"==ERROR== Failed to find metric regex:^{unknown[0].partition('.')[0]}\\.(avg|sum)$\n"
        with open(command[command.index("--log-file") + 1], "w") as file:
            file.write(text)
        return types.SimpleNamespace(stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    monkeypatch.setattr(Contender, "missing", lambda self: None)
    return state


@pytest.mark.parametrize("lists", [True, False])
def test_metrics_that_ncu_does_not_know_do_not_break_the_others(ncu, lists):
    ncu.metrics -= {GMMA, "sm__inst_executed_pipe_xu.sum"}
    ncu.lists = lists
    ncu.kernels = {OURS: [("attention_forward_mosaic", {CYCLES: "689012"})]}
    kernels = counters.kernels_of(["python", OURS], "ncu", counters.known_metrics("ncu"))
    assert kernels == [counters.Kernel("attention_forward_mosaic", {CYCLES: 689012.0})]
    assert len(ncu.commands) == (1 if lists else 3)
    asked = ncu.commands[-1][ncu.commands[-1].index("--metrics") + 1].split(",")
    assert set(asked) == ncu.metrics
    assert all(option in ncu.commands[-1] for option in ("--csv", "--clock-control", "none"))


def test_what_ncu_cannot_count_is_an_error_with_its_words(ncu):
    ncu.kernels = {OURS: []}
    with pytest.raises(RuntimeError, match="ncu counts nothing:\n==PROF== Connected"):
        counters.kernels_of(["python", OURS], "ncu", [CYCLES])


def test_contenders_stand_side_by_side_with_the_sums_of_their_kernels(ncu, capsys):
    ratio = "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
    ncu.kernels = {
        OURS: [("attention_forward_mosaic", {CYCLES: "689012", ratio: "1.987"})],
        "flash_attention_3": [(FA3, {CYCLES: "600000", ratio: "1.6"}), ("prepare", {CYCLES: "42000", ratio: "0.5"})],
    }
    assert counters.main(["--only", f"^{FORWARD}$"]) == 0
    *names, cycles, stalled = (line.split() for line in capsys.readouterr().out.splitlines())
    assert names == [
        [OURS, *["flash_attention_3"] * 3],
        ["attention_forward_mosaic", "FlashAttnFwdSm90", "prepare", "all"],
    ]
    assert cycles[-4:] == ["689,012", "600,000", "42,000", "642,000"]
    assert stalled[-4:] == ["1.99", "1.60", "0.50", "-"]
    assert [command[-1] for command in ncu.commands] == [OURS, "flash_attention_3"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "causal=1"], "argument --only: must leave one cell, leaves"),
        (["--only", "nothing"], "argument --only: must leave one cell, leaves 0; see --list"),
        (["--only", f"^{FORWARD}$", "--contenders", "ours,torch"], "argument --contenders: no torch"),
        (["--only", f"^{FORWARD}$", "--ncu", "no/such/ncu"], "argument --ncu: there is no program 'no/such/ncu'"),
        (["--only", f"^{FORWARD}$", "--launch", OURS], "JAX sees no GPU"),
    ],
)
def test_bad_arguments(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(harness, "gpu_name", lambda: None)
    assert counters.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_cells_are_listed(capsys):
    assert counters.main(["--list", "--only", "causal", "--only", "window"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("window=1024" in line for line in lines)


def test_one_call_after_the_warm_up_is_between_the_marks_of_the_profiler(monkeypatch):
    order = []

    class Cuda:
        def __getattr__(self, name):
            return lambda *arguments: order.append(name) or 0

    def called():
        jax.debug.callback(lambda: order.append("call"))
        return jnp.ones(())

    cell = sustained.cells()[0]
    object.__setattr__(cell, "contenders", (Contender(OURS, lambda: called),))
    object.__setattr__(cell, "inputs", lambda key, hurtful: ())
    monkeypatch.setattr(harness, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(harness, "gpu_ordinal", lambda: 0)
    monkeypatch.setattr(counters.ctypes, "CDLL", lambda name: Cuda())
    counters.launch(cell, OURS)
    jax.effects_barrier()
    start, stop = order.index("cuProfilerStart"), order.index("cuProfilerStop")
    assert order.count("call") == 1 + counters.WARM_UPS
    assert stop == len(order) - 1
    assert start == stop - 2
    monkeypatch.setattr(Cuda, "__getattr__", lambda self, name: lambda *arguments: 201)
    with pytest.raises(RuntimeError, match="cuDevicePrimaryCtxRetain fails: error 201"):
        counters.launch(cell, OURS)
