export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
python3 -m pip install -q --no-deps --no-index --break-system-packages .lab/wheels/*.whl 2>&1 | grep -v -i warn | tail -2
C=f0767dd
t() { date +%T; XLA_PYTHON_CLIENT_PREALLOCATE=false timeout $1 python3 -m pytest -q -m gpu -p insta -p no:cacheprovider -p no:benchmark -n ${W:-8} "${@:2}" 2>&1 | grep -v SKIPPED | tail -${L:-12}; }
b() { date +%T; timeout $1 python3 -m benchmarks sharded --only "$2" --peers "one device,jax.nn,optax" --wall-only --commit $C --out $OUT/$3 2>&1 | grep devices | cut -c1-170; }
L=40 W=13 t 75 tests/attention/test_context_parallel.py tests/attention/test_triton.py -k "triton"
b 140 "(8192x32768|8192x8192|100514|151936|mesh=auto|1x8192|kv_heads|deterministic).*devices=2|devices=2 (mesh=auto|kv_heads|zigzag)" new
b 120 "(131072|class_axis=0|16384x4096x128256|8192x128256) *(class_axis=0 )?devices=2$|1x32768x16x128 *(causal=1 )?devices=2$" old
date +%T
XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 70 compute-sanitizer --tool memcheck python3 .lab/san.py 2>&1 | tail -9
date +%T
