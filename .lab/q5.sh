export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
python3 -m pip install --no-deps --no-index --break-system-packages .lab/wheels/*.whl 2>&1 | tail -2; python3 -c "import jax_triton; print(jax_triton.__version__)"
date +%T
timeout 80 python3 .lab/abba.py 8 0.6 forward,both now,flat 2>&1 | grep sustained
export XLA_PYTHON_CLIENT_PREALLOCATE=false
t() { date +%T; timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n ${W:-8} "${@:2}" 2>&1 | grep -v SKIPPED | tail -${L:-12}; }
W=12 t 90 tests/attention/test_context_parallel.py tests/attention/test_triton.py -k "triton"
date +%T
timeout 40 compute-sanitizer --tool memcheck python3 .lab/san.py 2>&1 | tail -9
date +%T
timeout 60 compute-sanitizer --tool racecheck python3 .lab/san.py 2>&1 | tail -9
date +%T
