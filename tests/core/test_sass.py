"""The listing of attention's kernels that `python -m tests.core.sass` prints."""

import pytest

from tests.core import sass
from tests.support import xla_cuda


def test_spills_are_counted_between_products_and_outside():
    listing = "STL [R1], R2\nHGMMA.64x128x16 R24\nLDL R2, [R1]\nFADD R1, R1, R2\nHGMMA.64x64x16 R24\nLDL.LU R3, [R1]\n"
    assert sass.summary(listing) == "6 lines, 2 products, 3 spills, 1 of them between products"
    assert sass.summary("FADD R1, R1, R2") == "1 lines, 0 products, 0 spills, 0 of them between products"


def test_a_machine_without_the_plugin_cannot_compile(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(xla_cuda, "sharding", lambda: "needs a GPU, or jax's plugin for CUDA")
    assert sass.main(["--out", str(tmp_path / "x.sass")]) == 2
    assert "jax's plugin" in capsys.readouterr().err
    assert not (tmp_path / "x.sass").exists()


def listing(*lines):
    """A listing with control codes of instructions: scoreboards that are waited for, the one that is set, and the text."""
    lines = [line if isinstance(line, str) else "{:>4}:-:{}:Y:02        /*{:04x}*/ {:>18} ".format(*line) for line in lines]
    return "\n".join(["\t.target\tsm_90", ".text.kernel:", *lines])


def line(address, text, waits="-", scoreboard="-"):
    return waits, scoreboard, address, text


LOAD = line(0x10, "LDS.64 R4, [R2]", scoreboard="2")
ARRIVAL = line(0x90, "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ")
FOUND = "SYNCS.ARRIVE.TRANS64.A1T0 at 0090 with loads in flight from"


def consumer(waits):
    return line(0x50, "FADD R4, R4, R5", waits)


def test_a_load_is_in_flight_at_an_arrival_unless_an_instruction_waits_for_it():
    assert sass.loads_in_flight(listing(LOAD, ARRIVAL)) == [f"{FOUND} 0010"]
    assert sass.loads_in_flight(listing(LOAD, consumer("1"), ARRIVAL)) == [f"{FOUND} 0010"]
    assert sass.loads_in_flight(listing(LOAD, ARRIVAL, consumer("2"))) == [f"{FOUND} 0010"]
    for waits in ("2", "3&2", "2&0", "0x1c"):
        assert sass.loads_in_flight(listing(LOAD, consumer(waits), ARRIVAL)) == []
    assert sass.loads_in_flight(listing(LOAD, consumer("0x1b"), ARRIVAL)) == [f"{FOUND} 0010"]
    assert sass.loads_in_flight(listing(LOAD, line(0x90, "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ", "2"))) == []
    assert sass.loads_in_flight(listing(line(0x10, "LDG.E R4, [R2]", scoreboard="2"), ARRIVAL)) == []


def test_a_scoreboard_is_emptied_by_depbar():
    def found(text):
        return sass.loads_in_flight(listing(LOAD, line(0x50, text), ARRIVAL))

    assert found("DEPBAR.LE SB2, 0x0") == []
    for text in ("DEPBAR.LE SB0, 0x0", "DEPBAR.LE SB2, 0x1", "@P0 DEPBAR.LE SB2, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"):
        assert found(text) == [f"{FOUND} 0010"]


def test_loads_share_a_scoreboard_or_have_none():
    more = line(0x20, "LDSM.16.M88.4 R8, [R2]", scoreboard="2")
    other = line(0x20, "@!P1 LDS R8, [R2]", scoreboard="3")
    bare = line(0x08, "LDS R8, [R3]")
    assert sass.loads_in_flight(listing(LOAD, more, ARRIVAL)) == [f"{FOUND} 0010 0020"]
    assert sass.loads_in_flight(listing(LOAD, more, consumer("2"), ARRIVAL)) == []
    assert sass.loads_in_flight(listing(LOAD, consumer("2"), more, ARRIVAL)) == [f"{FOUND} 0020"]
    assert sass.loads_in_flight(listing(LOAD, other, consumer("2"), ARRIVAL)) == [f"{FOUND} 0020"]
    # The next load has a scoreboard, and finishes later.
    assert sass.loads_in_flight(listing(bare, LOAD, consumer("2"), ARRIVAL)) == []
    assert sass.loads_in_flight(listing(bare, LOAD, ARRIVAL)) == [f"{FOUND} 0008 0010"]
    assert sass.loads_in_flight(listing(bare, other, consumer("3"), ARRIVAL)) == [f"{FOUND} 0008"]
    assert sass.loads_in_flight(listing(LOAD, bare, consumer("2"), ARRIVAL)) == [f"{FOUND} 0008"]
    assert sass.loads_in_flight(listing(line(0x08, "@!PT LDS RZ, [RZ]"), ARRIVAL)) == []


def test_loads_are_followed_along_all_paths():
    jump, end = line(0x40, "@P1 BRA `(.L_x_1) "), line(0x60, "EXIT ")
    assert sass.loads_in_flight(listing(LOAD, end, ARRIVAL)) == []
    assert sass.loads_in_flight(listing(LOAD, line(0x60, "@P0 EXIT "), ARRIVAL)) == [f"{FOUND} 0010"]
    assert sass.loads_in_flight(listing(LOAD, jump, consumer("2"), end, ".L_x_1:", ARRIVAL)) == [f"{FOUND} 0010"]
    assert sass.loads_in_flight(listing(LOAD, consumer("2"), jump, end, ".L_x_1:", ARRIVAL)) == []
    always = line(0x40, "BRA `(.L_x_1) ")
    assert sass.loads_in_flight(listing(LOAD, always, ARRIVAL, ".L_x_1:", consumer("2"))) == []
    assert sass.loads_in_flight(listing(LOAD, line(0x40, "BRA.U UP0, `(.L_x_1) "), ARRIVAL, ".L_x_1:")) == [f"{FOUND} 0010"]
    # A loop whose load is in flight where its next turn arrives.
    assert sass.loads_in_flight(listing(".L_x_1:", ARRIVAL, consumer("3"), LOAD, jump, end)) == [f"{FOUND} 0010"]


def test_copies_to_shared_memory_are_found_and_named_barriers_are_not():
    for copy in ("UTMALDG.5D [UR8], [UR16]", "@!UP0 UBLKCP.S.S [UR8], [UR4], UR5"):
        (found,) = sass.loads_in_flight(listing(LOAD, line(0x90, copy)))
        assert found.endswith("at 0090 with loads in flight from 0010")
    for other in ("BAR.SYNC.DEFER_BLOCKING 0xa, 0x100", "SYNCS.PHASECHK.TRANS64 P0, [UR4], R2", "UTMAREDG.5D.ADD [UR8], [UR4]"):
        assert sass.loads_in_flight(listing(LOAD, line(0x90, other))) == []


def test_a_listing_without_control_codes_is_refused():
    with pytest.raises(ValueError, match="nvdisasm"):
        sass.loads_in_flight("ptxas info    : Used 168 registers")
