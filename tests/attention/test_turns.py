"""Blocks of threads that wait for each other's turns, as in deterministic gradients of attention, never wait for ever."""

import dataclasses
import itertools
import random

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import jaxsoftmax
from jaxsoftmax._core.target import target_for
from jaxsoftmax._gpu import schedule, sync, tickets
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention.mosaic_sm90.backward_plan import SIZES, BackwardGeometry, BiasGradient, backward_config
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST

from ..support import kernels
from ..support.emulator import emulated

brute_force = settings(max_examples=60, deadline=None, derandomize=True)
sides = st.none() | st.integers(0, 40) | st.integers(0, 700)
lengths = st.integers(1, 700)
KINDS = [*((size, "bfloat16") for size in SIZES), (64, "float32"), (128, "float32")]  # head sizes and dtypes
kinds = st.sampled_from(KINDS)
running, blocks, waves = st.integers(1, 5), st.integers(1, 9), st.integers(1, 4)


def plan_of(length, keys, window, kind, heads, *, deterministic=True, varying=False, soft_cap=None):
    size, dtype = kind
    dtype, passes_both = jnp.dtype(dtype), soft_cap is not None
    return BackwardGeometry(
        batch=(1,),
        query=(length, 2 * heads, size),
        key=(keys, heads, size),
        scale=0.125,
        window=window,
        soft_cap=soft_cap,
        dropout_rate=0.0,
        dtype=dtype,
        names=frozenset({"query", "key", "value"}),
        multiprocessors=132,
        bias_gradient=BiasGradient.ADDED if passes_both else BiasGradient.NONE,
        is_deterministic=deterministic,
        is_varying=varying,
        size=size,
        value_size=size,
        config=backward_config(size, size, dtype, passes_both=passes_both)[1],
    )


def turns(plan):
    """Lists for each tile the turns that it takes one after the other: the counter, and the value that it has to have.

    They are in the order in which consumers stage what is added: dQ of a step follows the bias of the next one. Each ends
    before the next is awaited. A bias is that of all heads.
    """
    found = []
    for tile in range(plan.n_tiles):
        head, number = divmod(tile, plan.tiles_of_head)
        low, high = plan.visited(number, HOST)
        heads = range(head * plan.heads_per_key_head, (head + 1) * plan.heads_per_key_head)
        steps = [(own, q) for own in heads for q in range(high - 1, low - 1, -1)]
        of_queries = [((own, q), number - plan.first_tile(q, HOST)) for own, q in steps]
        if plan.adds_bias_in_turns:
            of_bias = [(("bias", number, q), own) for own, q in steps]
            pairs = itertools.zip_longest(of_bias, [None, *of_queries])
            found.append([turn for pair in pairs for turn in pair if turn is not None])
        else:
            found.append(of_queries)
    return found


def hand_out(plan):
    """The tiles by their tickets, as the kernel's table has them."""
    costs = plan.costs()
    return schedule.order(costs, plan.n_tiles // plan.tiles_of_head, plan.n_heads_at_once(costs)).tolist()


@brute_force
@given(lengths, lengths, st.tuples(sides, sides), kinds, st.integers(1, 9), st.sampled_from((None, 5.0)))
def test_a_tile_waits_only_for_tiles_with_smaller_tickets(length, keys, window, kind, heads, soft_cap):
    plan = plan_of(length, keys, window, kind, heads, soft_cap=soft_cap)
    waits, order = turns(plan), hand_out(plan)
    np.testing.assert_array_equal(np.asarray(schedule.table(plan)), order)
    counters = {}
    for tile in order:  # those before each have done all that it waits for
        for counter, awaited in waits[tile]:
            assert counters.get(counter, 0) == awaited
            counters[counter] = awaited + 1


@pytest.mark.parametrize("slow", [0, 1])
def test_both_blocks_of_a_cluster_have_the_same_tickets(slow):
    """Whichever of them is behind."""
    count = 9

    def body(results, staged, barriers):
        rank = lax.axis_index("rank")
        sync.prepare_exchange(barriers, sync.BARRIERS_OF_PEERS)
        sync.cluster_wait()

        def send(number):
            tickets.await_received(barriers, number)
            sync.block_barrier()
            tickets.send_to_peer(staged, 2, 100 + 7 * number, barriers, number)
            return 100 + 7 * number

        def receive(number):
            ticket = tickets.receive_from_peer(staged, 2, barriers, number)
            sync.block_barrier()
            tickets.say_received(barriers, number)
            return ticket

        @pl.loop(0, count)
        def _(number):
            pause = jnp.where((rank == slow) & (lax.rem(number, jnp.int32(3)) == 1), 40, 0)
            pl.loop(0, pause)(lambda i: tickets.store_scalars(staged, 0, [i]))
            ticket = lax.cond(rank == 0, send, receive, number)
            tickets.store_by_first_thread(results, rank * count + number, ticket)
            # The emulator prefers who is further back in the program: a block that is here is overtaken.
            pl.loop(0, pause)(lambda i: tickets.store_scalars(staged, 0, [i]))

    def f():
        memory = {"staged": plgpu.SMEM((4, 1), jnp.int32), "barriers": plgpu.SMEM((sync.BARRIERS_OF_PEERS, 2), jnp.int32)}
        options = {"cluster": (2,), "cluster_names": ("rank",), "kernel_name": "tickets_mosaic", "scratch_types": memory}
        return kernel_of(body, out_type=jax.ShapeDtypeStruct((2 * count,), jnp.int32), **options)()

    found = emulated(f, kernels=["tickets_mosaic"])
    np.testing.assert_array_equal(found, [*range(100, 100 + 7 * count, 7)] * 2)


class Kernel:
    """A kernel's blocks of threads, as far as they wait for each other.

    `own` are tables of tiles that belong to each block, made by `schedule.schedule`; None for tickets, with so many waves.
    """

    def __init__(self, plan, blocks, own=None, waves=1):
        tickets, most = iter(hand_out(plan)), schedule.most_on_arrival(plan.n_tiles, blocks)
        self.waits, self.counters, self.missing = turns(plan), {}, plan.n_tiles
        self.count = waves * blocks
        self.left = [tickets] * self.count if own is None else [iter(row[1 : 1 + row[0]]) for row in own.tolist()]
        shares = [int(schedule.share(np.int32(wave), waves, most if own is None else plan.n_tiles)) for wave in range(waves)]
        self.may_take = np.repeat(shares, blocks).tolist()
        self.doing = {}

    def take(self, block):
        """Takes the next tile of a block; gives whether there is one."""
        tile = next(self.left[block], None) if self.may_take[block] else None
        if tile is None:
            self.doing.pop(block, None)
            return False
        self.may_take[block] -= 1
        self.doing[block] = list(self.waits[tile])
        return True

    def able(self, block):
        """Whether a block need not wait."""
        todo = self.doing[block]
        return not todo or self.counters.get(todo[0][0], 0) == todo[0][1]

    def go_on(self, block):
        """Takes a turn, or ends a tile; gives whether the block goes on."""
        if self.doing[block]:
            counter, awaited = self.doing[block].pop(0)
            self.counters[counter] = awaited + 1
            return True
        self.missing -= 1
        return self.take(block)


def get_through(kernels, running, seed):
    """Whether all tiles of kernels are done when only so many blocks run at a time, at any speeds.

    A block that is done makes room for one that has not run, of any kernel, whichever the GPU takes.
    """
    chance = random.Random(seed)
    waiting, here = [(kernel, block) for kernel in kernels for block in range(kernel.count)], []
    while waiting or here:
        while waiting and len(here) < running:
            kernel, block = waiting.pop(chance.randrange(len(waiting)))
            if kernel.take(block):
                here.append((kernel, block))
        able = [(kernel, block) for kernel, block in here if kernel.able(block)]
        if here and not able:
            return False
        if able:
            kernel, block = chance.choice(able)
            if not kernel.go_on(block):
                here.remove((kernel, block))
    return not any(kernel.missing for kernel in kernels)


@brute_force
@given(lengths, lengths, st.tuples(sides, sides), kinds, running, blocks, waves, st.integers())
def test_few_running_blocks_get_through_all_tiles(length, keys, window, kind, running, blocks, waves, seed):
    plan = plan_of(length, keys, window, kind, 3)
    assert get_through([Kernel(plan, blocks, waves=waves)], running, seed)


@brute_force
@given(lengths, lengths, kinds, running, blocks, waves, st.integers())
def test_two_kernels_that_share_a_gpu_get_through_all_tiles(length, keys, kind, running, blocks, waves, seed):
    plans = [plan_of(a, b, (None, 0), kind, 2) for a, b in ((length, keys), (keys, length))]
    assert get_through([Kernel(plan, blocks, waves=waves) for plan in plans], running, seed)


def test_blocks_that_have_their_tiles_beforehand_may_wait_for_ever():
    """That the checks above can fail: tiles that belong to blocks which do not run are waited for."""
    plan = plan_of(700, 700, (None, None), KINDS[0], 3)
    own = schedule.schedule(plan.costs(), 3, plan.n_heads_at_once(plan.costs()), 6)
    assert get_through([Kernel(plan, 6, own)], 6, 0)
    assert not get_through([Kernel(plan, 6, own)], 2, 0)


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_deterministic_gradients_take_tickets_in_order_of_arrival(kind, varying):
    for soft_cap in (None, 5.0):  # which needs the most shared memory
        plan = plan_of(300, 300, (None, None), kind, 2, varying=varying, soft_cap=soft_cap)
        assert plan.by_ticket
        assert {"tile", "tile_full", "tile_empty"} <= set(plan.scratch())
        assert "ticket" not in plan.scratch()


@pytest.mark.parametrize(("each", "expected"), [(1, 1), (2, 2), (3, 2), (4, 3), (8, 4), (100, 4)])
def test_waves_follow_each_other_where_blocks_take_several_tickets(each, expected):
    for deterministic, varying in ((True, False), (False, True), (False, False)):
        plan = plan_of(700, 700, (None, None), KINDS[1], 100, deterministic=deterministic, varying=varying)
        plan = dataclasses.replace(plan, multiprocessors=plan.n_tiles // each)
        assert schedule.waves(plan) == (expected if plan.by_ticket else 1)


# On a GPU.


def operands(length, kind, heads=16):
    size, dtype = kind
    keys = jax.random.split(jax.random.key(length + size), 4)
    return [jax.random.normal(key, (2, length, heads, size), jnp.dtype(dtype)) for key in keys]


def gradient(query, key, value, cotangent):
    def attend(*operands):
        return jaxsoftmax.dot_product_attention(
            *operands, is_causal=True, deterministic_gradients=True, implementation="mosaic"
        )

    return jax.vjp(attend, query, key, value)[1](cotangent)


def bits(arrays):
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(arrays)]


def crowded(times):
    """A context that lowers for a GPU with so many times the multiprocessors."""
    here = target_for("cuda")
    return kernels.target(here, multiprocessors=times * here.multiprocessors)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_native_more_blocks_than_run_at_a_time_finish_with_the_same_bits(gpu, kind):
    given = operands(8192, kind)
    expected = bits(jax.jit(gradient)(*given))
    with crowded(4):
        program = jax.jit(gradient)
        for _ in range(3):
            assert bits(program(*given)) == expected
