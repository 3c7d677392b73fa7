"""The same program in every process: the cache of compiled programs hits, and hosts that run one program together agree."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_programs_do_not_depend_on_the_order_of_sets():
    root = Path(__file__).parents[2]

    def start(seed):
        env = os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "tests.core.lowered"]
        return subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True)

    first, *others = [json.loads(process.communicate()[0]) for process in [start(seed) for seed in range(3)]]
    assert len(first) == 10
    for other in others:
        assert {name: first[name] == found for name, found in other.items()} == dict.fromkeys(first, True)
