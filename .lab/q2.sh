export PYTHONPATH=.:.lab PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=index,clocks.sm,power.draw,temperature.gpu --format=csv
date +%T
JSM_WAVES=4 timeout 70 python3 .lab/prof.py both 2>&1 | grep -v "^W\|^I" | grep "==\|backward\|nccl" | head -30
date +%T
timeout 300 python3 .lab/ab.py 5 0.5 both,forward now,w2,w4,w8+t2,nocomm,w4+nocomm 2>&1 | grep median
date +%T
