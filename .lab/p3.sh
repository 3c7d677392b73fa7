export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
C=$1
t() { date +%T; XLA_PYTHON_CLIENT_PREALLOCATE=false timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n ${W:-8} "${@:2}" 2>&1 | grep -v SKIPPED | tail -30; }
b() { date +%T; timeout $1 python3 -m benchmarks sharded --only "$2" --peers 'one device' --wall-only --commit $C --out $OUT/$3 2>&1 | grep devices; }
Z="attention.*1x32768x16x128 *causal=1 devices=2 zigzag=2$"
b 60 "$Z" z1
b 60 "$Z" z2
t 200 tests/attention/test_context_parallel.py
W=12 t 150 tests/attention/test_values.py -k "segments or lengths"
date +%T
timeout 60 python3 examples/train_tiny_lm.py --help 2>&1 | grep -n -A3 "mesh\|dtype" | head
timeout 60 python3 examples/train_tiny_lm.py --mesh data=2 --steps 30 --dtype bfloat16 --out $OUT/lm 2>&1 | tail -4
date +%T
timeout 60 python3 -m benchmarks links --commit $C --out $OUT/links 2>&1 | tail -20
date +%T
