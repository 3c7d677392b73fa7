export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
pip install -q --no-deps .lab/wheels/*.whl 2>&1 | grep -v WARN | tail -1
date +%T
timeout 70 python3 .lab/prof.py both 2>&1 | grep -v "^W\|^I" | grep "==\|backward\|nccl" | head -30
date +%T
timeout 200 python3 .lab/ab.py 5 0.5 both,forward now,flat,two 2>&1 | grep median
export XLA_PYTHON_CLIENT_PREALLOCATE=false
t() { date +%T; timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n ${W:-8} "${@:2}" 2>&1 | grep -v SKIPPED | tail -30; }
t 100 tests/attention/test_mosaic_forward.py tests/attention/test_mosaic_backward.py tests/attention/test_turns.py -k "go_on or parts_of_sums or turns"
t 150 tests/attention/test_context_parallel.py
date +%T
