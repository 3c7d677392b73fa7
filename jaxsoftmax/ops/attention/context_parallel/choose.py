"""Choice of the strategy by which devices share a sequence.

If only queries are sharded, each device has all keys. If keys are sharded over mesh axes of their own, devices merge states. If
queries and keys are sharded over the same axes, the user chooses, or a model of the time does:

    ring         first step + sum over the other steps of max(computation, keys / BYTES_PER_SECOND) + START_SECONDS
    all_gather   computation of the busiest device + (n - 1) keys / BYTES_PER_SECOND + START_SECONDS
    all_to_all   mean computation + (queries + keys + n (masks and biases)) / BYTES_PER_SECOND + 2 START_SECONDS

Computation is that of the forward pass, from the share of the keys that each device's queries see. A step of a ring takes as
long as its busiest device computes. The constants are those of H200s with NVLink; the three strategies were not timed against
each other.
"""

import math
from typing import get_args

import numpy as np

from jaxsoftmax.ops.attention.context_parallel.cut import OF_BOTH
from jaxsoftmax.ops.attention.context_parallel.settings import Strategy
from jaxsoftmax.ops.attention.context_parallel.shard import AttentionShard
from jaxsoftmax.ops.attention.context_parallel.visible import visible_shares

STRATEGIES = get_args(Strategy)

# Constants of the model.
_OPERATIONS_PER_SECOND = 6e14  # an H200 attends to 32768 tokens, 16 heads of 128, in 13.95 ms: 630 TFLOP/s
_BYTES_PER_SECOND = 2.6e11  # NCCL sends 134 MB between two GPUs in 470 us if nothing else runs, in 540 us beside a kernel
_START_SECONDS = 3e-5  # what a step takes beside computation and bytes: kernels and collectives start
_MOST_GATHERED_BYTES = 2**29  # keys and values that a device may receive from the others


def strategy_of(shard: AttentionShard, requested: Strategy | None) -> str:
    """Names the strategy for an attention: one of `STRATEGIES`, "merge", or "whole" where no sequence is sharded.

    Args:
      shard: the attention.
      requested: the strategy that the user asks for, or None. It has no effect where there is no choice.

    Raises:
      NotImplementedError: the strategy that the user asks for cannot run.
    """
    queries, keys = shard.sequences.queries, shard.sequences.keys
    if not keys.axes:
        return "all_gather" if queries.axes else "whole"
    if not set(keys.axes) & set(queries.axes):
        return "merge"
    obstacles = _obstacles(shard)
    if requested in obstacles:
        reason = obstacles[requested]
        raise NotImplementedError(f"dot_product_attention: parallel.strategy={requested!r} cannot run: {reason}")
    return requested or _cheapest(shard, [strategy for strategy in STRATEGIES if strategy not in obstacles])


def _obstacles(shard) -> dict[str, str]:
    """Maps strategies that cannot run to the reasons."""
    queries, keys, obstacles = shard.sequences.queries, shard.sequences.keys, {}
    devices = queries.devices
    if queries.axes != keys.axes:
        obstacles = dict.fromkeys(("ring", "all_to_all"), "queries and keys are cut over different mesh axes")
    elif not shard.sequences.can_ring:
        obstacles["ring"] = f"the order is that of zigzag={queries.zigzag}, and there are {devices} shards"
    heads, key_heads = (shard.operands[name].shape[-2] for name in ("query", "key"))
    if heads % devices or key_heads % devices:
        reason = f"{devices} devices cannot share {heads} heads and {key_heads} key heads evenly"
        obstacles.setdefault("all_to_all", reason)
    if queries.length == 1 and not OF_BOTH.isdisjoint(shard.operands):
        obstacles.setdefault("all_to_all", "it is not known whether devices share masks and biases")
    return obstacles


def _cheapest(shard, candidates: list[str]) -> str:
    """Chooses the candidate that should take the least time."""
    if len(candidates) == 1:
        return candidates[0]
    query, value = shard.operands["query"], shard.operands["value"]
    *batch, length, heads, size = query.shape
    *_, n_keys, key_heads, value_size = value.shape
    devices = shard.sequences.queries.devices
    entries = _product(batch)
    bytes_of_head = entries * (size + value_size) * query.dtype.itemsize
    query_bytes, key_bytes = bytes_of_head * heads * length, bytes_of_head * key_heads * n_keys
    scores = [shard.operands[name] for name in ("bias", "mask") if name in shard.operands]
    score_bytes = sum(_product(x.shape) * x.dtype.itemsize for x in scores)
    whole_step = 2 * entries * heads * length * n_keys * (size + value_size) / _OPERATIONS_PER_SECOND
    # Seconds for which each device computes with the keys of each other one, `[shifts, devices]`.
    computation = whole_step * np.array([visible_shares(shard.sequences, shift) for shift in range(devices)])
    seconds = {}
    if "ring" in candidates:
        first, *others = (computation[step.shift].max() for step in shard.sequences.ring.steps)
        seconds["ring"] = first + sum(max(step, key_bytes / _BYTES_PER_SECOND) + _START_SECONDS for step in others)
    gathered_bytes = (devices - 1) * key_bytes
    seconds["all_gather"] = math.inf
    if gathered_bytes <= _MOST_GATHERED_BYTES:
        seconds["all_gather"] = computation.sum(0).max() + gathered_bytes / _BYTES_PER_SECOND + _START_SECONDS
    traded_bytes = query_bytes + key_bytes + devices * score_bytes
    seconds["all_to_all"] = computation.sum() / devices + traded_bytes / _BYTES_PER_SECOND + 2 * _START_SECONDS
    return min(candidates, key=seconds.__getitem__)


def _product(sizes) -> int:
    """Multiplies sizes; one that is not known before the program runs, as that of a batch may be, counts as 1."""
    return math.prod([size for size in sizes if isinstance(size, int)])
