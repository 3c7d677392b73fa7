# Tasks. `uv run just` lists them. CI runs `run` for each change, and those that `.github/workflows/weekly.yml` names weekly.

[private]
default:
    @just --list --unsorted

# All tests but the slow ones, a process for each core.
test *args:
    uv run pytest -n auto {{ args }}

# Tests that take minutes, or repeat for another dtype, length or mesh what runs by default.
slow *args:
    uv run pytest -n auto -m "slow and not gpu" {{ args }}

# All tests but the slow ones on the newest JAX; with `--kinds` one of each kind.
newest *args:
    .ci/newest {{ args }}

# All tests but the slow ones on another Python.
python version="3.13" *args:
    uv run --isolated --python {{ version }} pytest -n auto {{ args }}

# All tests but the slow ones, compiled and lowered as users' programs are.
optimised *args:
    uv run pytest -n auto --as-users-compile {{ args }}

# All tests but the slow ones in three random orders.
shuffled *args:
    for seed in 1 2 3; do uv run --with pytest-randomly pytest -n auto -p randomly --randomly-seed=$seed {{ args }} || exit; done

# Faults put into the library, which tests have to see.
mutants *args:
    uv run python -m tests.mutants {{ args }}

# Kernels of Triton, with the newest jax-triton and Triton, without a GPU.
triton:
    .ci/triton

# Kernels, on an NVIDIA GPU.
gpu *args:
    uv run --extra cuda13 pytest -m "gpu and not slow" {{ args }}

# Measures a suite of benchmarks on an NVIDIA GPU, as `just bench softmax --only bfloat16`.
bench suite *args:
    uv run --extra cuda13 python -m benchmarks {{ suite }} {{ args }}

# The site of the documents, into `site/`. A broken link or reference fails.
docs *args:
    uv run --isolated --only-group docs mkdocs build --strict {{ args }}

# The site on this machine, built anew whenever a document changes.
docs-serve *args:
    uv run --isolated --only-group docs mkdocs serve {{ args }}

# What the documents say, the code in them, and the examples of docstrings.
docs-test *args:
    uv run pytest -n auto tests/tools/test_readme.py tests/tools/test_recipes.py tests/tools/test_reference.py tests/tools/test_site.py {{ args }}

# Lint, format and types.
lint:
    uv run ruff check .
    uv run ruff format --check .
    uv run pyrefly check

# All that has to pass before a change lands.
run:
    .ci/run
