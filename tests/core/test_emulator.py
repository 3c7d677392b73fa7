"""The emulator of kernels: what it refuses, and what it notices."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir.dialects import arith

from jaxsoftmax._gpu.emit import address_of, constant, emit, i64, shared_address, utils
from jaxsoftmax._gpu.kernel import kernel_of

from ..support.emulator import emulated


def run(asm):
    """What the threads of two warpgroups store, by PTX of $0, where it goes, $1, their number, and $2, shared memory."""

    def body(out, shared):
        def store(out, shared):
            thread = utils.thread_idx()
            place = arith.addi(address_of(out), arith.muli(i64(thread), i64(4)))
            utils.inline_ptx(asm, place, thread, shared_address(shared, constant(0)), has_side_effects=True, convergent=True)

        emit(store, (out, shared))

    def f():
        return kernel_of(
            body,
            out_type=jax.ShapeDtypeStruct((256,), jnp.int32),
            num_threads=2,
            thread_name="warpgroup",
            scratch_types=[plgpu.SMEM((256,), jnp.int32)],
            kernel_name="test_mosaic",
        )()

    return np.asarray(emulated(f, kernels=["test_mosaic"]))


STORE = "shl.b32 place, $1, 2; add.u32 place, place, $2; st.shared.b32 [place], $1;"
LOAD = "xor.b32 word, $1, {}; shl.b32 place, word, 2; add.u32 place, place, $2; ld.shared.b32 word, [place];"


def swapped(barrier, distance):
    return f"{{ .reg .b32 place, word; {STORE} {barrier} {LOAD.format(distance)} st.global.b32 [$0], word; }}"


@pytest.mark.parametrize("distance", [1, 32, 128])
def test_threads_read_what_others_have_stored_before_a_barrier(distance):
    np.testing.assert_array_equal(run(swapped("bar.sync 0;", distance)), np.arange(256) ^ distance)


def test_a_barrier_that_is_missing_is_noticed():
    assert (run(swapped("", 32)) != np.arange(256) ^ 32).any()


def test_what_is_never_stored_is_garbage():
    found = run("{ .reg .pred is; setp.lt.u32 is, $1, 7; @is st.global.b32 [$0], $1; }")
    np.testing.assert_array_equal(found[:7], np.arange(7))
    assert np.isnan(found[7:].view(np.float32)).all()


@pytest.mark.parametrize(
    ("asm", "reason"),
    [
        ("st.global.b32 [$0+1024], 0;", "memory outside of all arrays"),
        ("st.shared.b32 [$2+1048576], 0;", "memory outside of all arrays"),
        ("st.shared.b32 [$2+2], 0;", "no multiple of 4"),
        ("{ .reg .pred is; setp.lt.u32 is, $1, 64; @is bra here; bar.sync 1; here: }", "all threads wait"),
        ("{ .reg .pred is; again: mbarrier.try_wait.parity.shared::cta.b64 is, [$2], 0; @!is bra again; }", "not there yet"),
        ("{ .reg .pred is; setp.lt.u32 is, $1, 8; @is bra here; bar.warp.sync 0xffffffff; here: }", "that do not come"),
        ("again: bra again;", "without an end"),
    ],
)
def test_faults_are_noticed(asm, reason):
    with pytest.raises(AssertionError, match=reason):
        run(asm)


@pytest.mark.parametrize("asm", ["sin.approx.f32 $1, $1;", "st.global.b128 [$0], 0;", "cp.async.bulk.wait_group 0;"])
def test_instructions_that_are_not_known_are_named(asm):
    with pytest.raises(NotImplementedError, match="the emulator does not know"):
        run(asm)
