"""How the tangent kernel runs a problem: the products that its tangents ask for, tiles, and shared memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.attention import key_blocks
from jaxsoftmax.ops.attention.mosaic_sm90.common import ROWS, shapes_of
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardConfig, ForwardGeometry, sizes_on_chip, with_tables

# With these operands a thread loads or makes an element for each score, or for each of its keys.
_OF_SCORES = {"bias", "mask", "seeds", "query_segments"}
LARGEST = 256  # head size whose products registers and shared memory hold


@dataclass(frozen=True)
class TangentConfig(ForwardConfig):
    """Settings of a block of threads of the tangent kernel. `stages` are those of keys and their tangents."""

    value_stages: int = 2  # of values and their tangents
    # Queries are copied to registers once for each tile. Two products of 64 columns then read half as much of shared memory,
    # whose bandwidth they would need in full.
    has_queries_in_registers: bool = False


@dataclass(frozen=True)
class TangentGeometry(ForwardGeometry):
    """The geometry of the tangent kernel for one problem. Tiles are those of the forward kernel."""

    config: TangentConfig

    @property
    def stages_segments(self) -> bool:
        return False  # `TangentCopies` copies none

    @property
    def fits_columns(self) -> bool:
        return False  # slots of tangents are behind the others

    @property
    def moves_scores(self) -> bool:
        """True if scores have a tangent, and so the log-sum-exp."""
        return not {"d_query", "d_key", "d_bias"}.isdisjoint(self.names)

    @property
    def multiplies_tangents(self) -> bool:
        """True if the tangent of the scores has products of queries and keys."""
        return not {"d_query", "d_key"}.isdisjoint(self.names)

    def sources(self, name: str) -> list[str]:
        """Lists what the slots of queries, keys or values hold: the operand `name`, its tangent, or both."""
        is_there = {name: name != "value" or self.moves_scores, f"d_{name}": f"d_{name}" in self.names}
        return [source for source, there in is_there.items() if there]

    def describe(self) -> str:
        names = sorted(name.removeprefix("d_") for name in self.names if name.startswith("d_"))
        return f"{super().describe()}, tangents of {', '.join(names)}"

    def scratch(self) -> dict[str, Any]:
        config, memory = self.config, super().scratch()
        (head_size, head_slabs), (value_size, value_slabs) = zip(self.sizes, self.slabs, strict=True)
        n_queries, n_keys, n_values = (len(self.sources(name)) for name in ("query", "key", "value"))
        return memory | {
            # Tangents are behind the queries of all consumers, and behind the keys of all stages.
            "q": self._slots(n_queries * config.consumers, ROWS, head_size, head_slabs),
            "k": self._slots(n_keys * config.stages, config.block_kv, head_size, head_slabs),
            # Tangents are rows behind the values, so that one product takes both.
            "v": self._slots(config.value_stages, n_values * config.block_kv, value_size, value_slabs),
            "q_full": plgpu.Barrier(num_arrivals=n_queries * head_slabs, num_barriers=config.consumers),
            "k_full": plgpu.Barrier(num_arrivals=n_keys * head_slabs, num_barriers=config.stages),
            "v_full": plgpu.Barrier(num_arrivals=n_values * value_slabs, num_barriers=config.value_stages),
            "v_empty": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.value_stages),
        }


def tangent_configs(sizes: tuple[int, int], n_values: int, needs_registers: bool = False) -> list[TangentConfig]:
    """Lists the configurations for head sizes on chip, the best one first: shared memory may have no room for it.

    `n_values` is 2 if weights are multiplied both with values and with their tangents, else 1. `needs_registers` is True for
    masks, biases, dropout and segments, which take more of them. Registers of a thread that hold
    arrays: scores and their tangents, the output, 16 bits of the weights of the step before, and the queries.

        head size   S, tS    tO   P, P tS   Q    sum
         64         32, 32   32   32             128 of 160
        128         32, 32   64   32        32   192 of 240
        256         16, 16  128   16             176 of 240
    """
    if max(sizes) <= 64 and not needs_registers:
        return [TangentConfig(3, 64, 4, value_stages=4, registers=(32, 160), ping_pong=False)]
    if max(sizes) <= 128:
        return [TangentConfig(2, 64, 2, ping_pong=False, has_queries_in_registers=not needs_registers)]
    # Rows of values and of their tangents together are 64, as the swizzle of a product's operand asks for.
    block_kv, own_output = 64 // n_values, sizes[0] < sizes[1]
    stages = [(2, 2), (2, 1), (1, 1)]
    return [TangentConfig(2, block_kv, k, own_output, ping_pong=False, value_stages=v) for k, v in stages]


def shape_tangent(types: Mapping[str, Any], target: Target, **options: Any) -> TangentGeometry:
    """Shapes the kernel for operands of these types, by name: operands of attention, its results, and tangents.

    `options` are those of `AttentionProblem`. The configuration is the best one that shared memory has room for, or the last
    one.
    """
    has_reach = "mask" in types and key_blocks.is_shared(types["mask"])
    moves_scores = not {"d_query", "d_key", "d_bias"}.isdisjoint(types)
    # The log-sum-exp has what the sinks say of weights. A tangent of theirs is where the sum of the rows starts.
    left_out = {"sinks", "d_sinks"} | (set() if moves_scores else {"value"})
    left_out |= set() if moves_scores or "d_sinks" in types else {"out"}
    names = with_tables(types.keys() - left_out, has_reach) | ({"start"} if "d_sinks" in types else set())
    shapes, value_size = shapes_of(types, target) | {"names": names}, types["value"].shape[-1]
    sizes = sizes_on_chip(types["query"].shape[-1], value_size)
    geometries = [
        TangentGeometry(**shapes, **options, value_size=value_size, config=config)
        for config in tangent_configs(sizes, moves_scores + ("d_value" in types), not _OF_SCORES.isdisjoint(types))
    ]
    fitting = (geometry for geometry in geometries if geometry.shared_memory <= target.shared_memory)
    return next(fitting, geometries[-1])
