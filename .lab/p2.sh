export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
C=$1
t() { date +%T; timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n 8 "${@:2}" 2>&1 | grep -v SKIPPED | tail -40; }
b() { date +%T; timeout $1 python3 -m benchmarks sharded --only "$2" --peers 'one device' --wall-only --commit $C --out $OUT/$3 2>&1 | grep devices; }
t 150 tests/attention/test_mosaic_forward.py -k go_on
t 200 tests/attention/test_context_parallel.py
t 60 tests/attention/test_mosaic_backward.py -k parts_of_sums
unset XLA_PYTHON_CLIENT_PREALLOCATE
for i in 1 2; do
b 60 "attention.*1x32768x16x128 *causal=1 devices=2 zigzag=2$" def$i
XLA_FLAGS=--xla_gpu_use_memcpy_local_p2p=true b 60 "attention.*1x32768x16x128 *causal=1 devices=2 zigzag=2$" mem$i
done
date +%T
