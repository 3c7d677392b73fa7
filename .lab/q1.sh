export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
pip install -q --no-deps .lab/wheels/*.whl 2>&1 | tail -1
date +%T
timeout 70 python3 .lab/prof.py both 2>&1 | grep -v "^W\|^I" | tail -60
XLA_FLAGS=--xla_gpu_enable_command_buffer= timeout 70 python3 .lab/prof.py both 2>&1 | grep -v "^W\|^I"| tail -60
timeout 60 python3 .lab/prof.py forward 2>&1 | grep -v "^W\|^I"| tail -40
export XLA_PYTHON_CLIENT_PREALLOCATE=false
t() { date +%T; timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n ${W:-8} "${@:2}" 2>&1 | grep -v SKIPPED | tail -30; }
t 200 tests/attention/test_context_parallel.py
t 100 tests/attention/test_mosaic_forward.py tests/attention/test_mosaic_backward.py -k "go_on or parts_of_sums"
date +%T
