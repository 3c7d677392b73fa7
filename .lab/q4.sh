export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
pip install -q --no-deps .lab/wheels/*.whl 2>&1 | grep -v WARN | tail -1
date +%T
timeout 130 python3 .lab/ab2.py 5 0.4 both,forward now,flat 2>&1 | grep median
export XLA_PYTHON_CLIENT_PREALLOCATE=false
t() { date +%T; timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n ${W:-8} "${@:2}" 2>&1 | grep -v SKIPPED | tail -${L:-30}; }
W=12 t 220 tests/attention/test_context_parallel.py
W=12 t 130 tests/attention/test_triton.py tests/attention/test_values.py -k "triton"
date +%T
