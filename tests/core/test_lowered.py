"""The same program in every process: the cache of compiled programs hits, and hosts that run one program together agree."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import constraints, fragmented_array, layout_inference, layouts
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxsoftmax
from jaxsoftmax._core import compat

from ..support import cases, kernels
from . import lowered


@pytest.mark.parametrize(("options", "count"), [([], 36), pytest.param(["--every"], 74, marks=pytest.mark.slow)], ids=str)
def test_programs_do_not_depend_on_the_process(options, count, tmp_path):
    """Not on the order of its sets, nor on what it lowered before, nor on where the library is installed."""
    root = Path(__file__).parents[2]
    for folder in ("jaxsoftmax", "tests"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def start(seed, folder, *others):
        env = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "tests.core.lowered", *options, *others]
        return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True)

    processes = [start(0, root), start(3, tmp_path, "--reversed")]
    if options:  # seeds 0 and 1 agree about a set of two names
        processes += [start(seed, root) for seed in (1, 2)]
    first, *others = [json.loads(process.communicate()[0]) for process in processes]
    assert len([name for name in first if "triton" not in name]) == count
    for other in others:
        assert {name: first[name] == found for name, found in other.items()} == dict.fromkeys(first, True)


def modules_of(f, *avals):
    """The text of each Mosaic kernel of a program, without the number that JAX gives it."""
    return kernels.with_modules(f, *avals, see=lambda module: re.sub('dump_basename = "[^"]*"', "", str(module)))


@pytest.mark.skipif(tuple(jax.__version_info__) not in compat.TESTED, reason="this JAX infers layouts as it likes")
@pytest.mark.parametrize(
    "name", cases.quick("attention", "categorical", slow=["attention in float32", "attention, everything"])
)
def test_layouts_that_are_inferred_sooner_are_the_same(name):
    def sampled(x, key):
        return jaxsoftmax.categorical(key, x, temperature=0.5)

    def in_a_window(q):
        return jaxsoftmax.dot_product_attention(q, q, q, local_window_size=(30, 0))

    q, logits = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 32768), jnp.bfloat16)
    programs = {
        "attention": (in_a_window, q),
        "attention in float32": (in_a_window, jax.ShapeDtypeStruct(q.shape, jnp.float32)),
        "categorical": (sampled, logits, jax.eval_shape(lambda: jax.random.key(0))),
        "attention, everything": next(program[1:3] for program in lowered.programs() if program[0] == "attention, everything"),
    }
    sooner = modules_of(*programs[name])
    assert sooner
    names = [
        (fragmented_array.Tiling, "tile_shape"),
        (fragmented_array.Tiling, "untile_shape"),
        (fragmented_array.TiledLayout, "canonicalize"),
        (type(plgpu.Layout.WG_SPLAT(())), "to_mgpu"),
        (constraints.IsTransferableSmemRegisters, "_is_supported_smem_transfer"),
    ]
    if jax.__version_info__ == (0, 11, 2):
        names += [
            (constraints.ConstraintSystem, "__and__"),
            (constraints, "compute_transitively_equal_vars"),
            (layout_inference, "find_assignments_for"),
            (layouts, "_from_tiled_layout_attr"),
        ]
    with contextlib.ExitStack() as patches:
        for owner, replaced in names:
            patches.enter_context(mock.patch.object(owner, replaced, getattr(owner, replaced).__wrapped__))
        assert modules_of(*programs[name]) == sooner


@pytest.mark.skipif(tuple(jax.__version_info__) not in compat.TESTED, reason="nothing is replaced in this JAX")
def test_what_mosaic_takes_it_takes_where_layouts_are_remembered():
    compat.infer_layouts_sooner()
    tiling = plgpu.Layout.WGMMA.to_mgpu().tiling
    assert tuple(tiling.tile_shape([128, 64])) == tiling.tile_shape((128, 64))
    assert plgpu.Layout.WG_STRIDED([128], vec_size=1).to_mgpu().shape == [128]
