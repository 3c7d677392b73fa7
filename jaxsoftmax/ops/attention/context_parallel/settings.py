"""`ContextParallel`: the settings by which a user says how devices share the sequence of attention."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from jaxsoftmax._core import arguments
from jaxsoftmax.ops.attention.context_parallel import order

Strategy = Literal["ring", "all_gather", "all_to_all"]

_NAME = "ContextParallel"


@dataclass(frozen=True)
class ContextParallel:
    """Tells `dot_product_attention` how devices share a sequence (context parallelism).

    Arrays whose sequence axis is sharded over a mesh need no `ContextParallel`: attention runs on shards and picks the strategy
    that it expects to be the fastest. Pass one to choose the strategy, inside a `jax.shard_map`, or for tokens in zigzag order.

    Attributes:
      strategy: what devices exchange where queries and keys are sharded alike. None picks one by a model of its time.
        `"ring"`: keys and values travel around the devices; each device attends to the part that it holds (ring attention).
        `"all_gather"`: each device receives all keys and values.
        `"all_to_all"`: each device receives the whole sequence for a part of the heads (Ulysses). The numbers of query heads
        and of key heads must be multiples of the number of devices.
        If only queries or only keys are sharded, there is one strategy, and this field has no effect.
      axis_name: the mesh axis, or several mesh axes, over which a `jax.shard_map` around the call shards the sequence in
        equal parts. T and S are the lengths of a shard then; masks and biases still have all keys. None elsewhere: the types of
        the arrays, or XLA, say how they are sharded.
      zigzag: the `n` of `jaxsoftmax.zigzag`, by which queries, keys, values and everything else with an axis T or S are
        ordered; None for the usual order. Positions stay those of the usual order. In a causal ring of `n` devices this order
        gives every device equal work. With another number of devices a ring cannot run: `"ring"` raises NotImplementedError,
        and None picks another strategy.
      replicated_queries: True if every device has all queries, and only keys and values are sharded: a decoding step with a
        sharded cache. Each device attends to its own keys, and their states are merged. Needs `axis_name`.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: `strategy` is not one of the three, `axis_name` is empty or repeats a name, `zigzag` is less than 1, or
        `replicated_queries` comes without `axis_name`.

    Examples:
      >>> import functools
      >>> import jax
      >>> import jaxsoftmax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("sequence",))
      >>> parallel = jaxsoftmax.ContextParallel("ring", axis_name="sequence")
      >>> attend = functools.partial(jaxsoftmax.dot_product_attention, is_causal=True, parallel=parallel)
      >>> spec = P(None, "sequence")
      >>> attend = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
      >>> x = jax.random.normal(jax.random.key(0), (1, 64, 4, 16))  # batch, sequence, heads, head size
      >>> x = jax.device_put(x, NamedSharding(mesh, spec))
      >>> attend(x, x, x).shape
      (1, 64, 4, 16)
    """

    strategy: Strategy | None = None
    _: KW_ONLY
    axis_name: str | Sequence[str] | None = None
    zigzag: int | None = None
    replicated_queries: bool = False

    def __post_init__(self) -> None:
        if self.strategy is not None and not isinstance(self.strategy, str):
            raise TypeError(f"{_NAME}: strategy must be None or a string, got {arguments.shown(self.strategy)}")
        if self.strategy is not None and self.strategy not in get_args(Strategy):
            names = ", ".join(map(repr, get_args(Strategy)))
            raise ValueError(f"{_NAME}: strategy must be None or one of {names}, got {arguments.shown(self.strategy)}")
        names = arguments.names(_NAME, "axis_name", self.axis_name)
        if "" in names or len(set(names)) != len(names):
            what = arguments.shown(self.axis_name)
            raise ValueError(f"{_NAME}: axis_name must name mesh axes, each once, got {what}")
        (replicated,) = arguments.flags(_NAME, replicated_queries=self.replicated_queries)
        if replicated and not names:
            raise ValueError(f"{_NAME}: replicated_queries must come with axis_name, got {arguments.shown(self.axis_name)}")
        object.__setattr__(self, "axis_name", names or None)
        object.__setattr__(self, "replicated_queries", replicated)
        if self.zigzag is not None:
            object.__setattr__(self, "zigzag", order.check(_NAME, "zigzag", self.zigzag))


_UNSET = ContextParallel()  # made once: a call without `parallel` checks nothing


def as_context_parallel(function: str, parallel: ContextParallel | None) -> ContextParallel:
    """Returns `parallel`, or one without settings for None; raises in the name of a public function otherwise."""
    if parallel is None:
        return _UNSET
    if not isinstance(parallel, ContextParallel):
        what = arguments.shown(parallel)
        raise TypeError(f"{function}: parallel must be None or a jaxsoftmax.ContextParallel, got {what}")
    return parallel
