"""Rules for attention whose sequence devices share: each chooses a strategy, and calls its function on a device's shard.

The lowering calls a rule on each device. The rule hands attention of shards back to `runner`, which chooses an implementation
for it. So kernels know nothing of devices, and `explain` shows shards. The strategies and their sources are in
`context_parallel`.
"""

from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.context_parallel import all_to_all, choose, gather, merge, ring
from jaxsoftmax.ops.attention.context_parallel.shard import AttentionShard, shard_of

# Modules with the functions of each strategy: `attention(shard)`, `tangents(shard)` and `cotangents(shard, wanted)`.
_STRATEGIES = {"ring": ring, "all_gather": gather, "all_to_all": all_to_all, "merge": merge, "whole": all_to_all}


def dot_product_attention(runner, *, return_lse=True, **arguments):
    """Computes `[out, lse]`, or `[out]`, for a shard.

    Args:
      runner: `runner(operation, operands, **params)` computes the results of an operation on this device.
      return_lse: True if lse is a result.
      arguments: shards of the operands by name, None if absent, and parameters: those of the primitive and of `_chosen`. Masks
        and biases have this device's queries, and all keys.
    """
    strategy, shard = _chosen(runner, primitive.ATTENTION, arguments)
    return strategy.attention(shard)[: 2 if return_lse else 1]


def dot_product_attention_jvp(runner, **arguments):
    """Computes `[dout, dlse]` for a shard."""
    strategy, shard = _chosen(runner, primitive.ATTENTION_JVP, arguments)
    return strategy.tangents(shard)


def dot_product_attention_vjp(runner, *, wanted, **arguments):
    """Computes the cotangents of the operands `wanted` for a shard.

    In a `shard_map` of the user each device has its part of the cotangent of an operand that devices share.
    """
    strategy, shard = _chosen(runner, primitive.ATTENTION_VJP, arguments)
    return strategy.cotangents(shard, wanted)


def _chosen(runner, operation, arguments):
    """Returns the module of the strategy for a call, and the record of its shard.

    Parameters among the arguments: `cuts` has a `Cut` for each of "queries" and "keys" that is sharded. `strategy` is the one
    that the user asks for. `knows_cuts` is False if it is not known how the sequences are sharded: the rule runs because of the
    zigzag order alone, perhaps on whole sequences, which is no error then. The others are those of `shard_of`.
    """
    operands = {name: arguments[name] for name in operation.by_name if arguments.get(name) is not None}
    params = {name: param for name, param in arguments.items() if name not in operation.by_name}
    requested, knows_cuts = params.pop("strategy", None), params.pop("knows_cuts", True)
    requested = requested if knows_cuts else None
    if requested is not None and {"queries", "keys"}.isdisjoint(params["cuts"]):
        raise ValueError(
            "dot_product_attention: parallel.strategy must be None where no sequence is sharded, got"
            f" {requested!r} with whole queries and keys; in a jax.shard_map give parallel.axis_name"
        )
    shard: AttentionShard = shard_of(runner, operands, **params)
    return _STRATEGIES[choose.strategy_of(shard, requested)], shard


RULES = {
    primitive.ATTENTION: dot_product_attention,
    primitive.ATTENTION_JVP: dot_product_attention_jvp,
    primitive.ATTENTION_VJP: dot_product_attention_vjp,
}
