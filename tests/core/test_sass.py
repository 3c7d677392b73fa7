"""The listing of attention's kernels that `python -m tests.core.sass` prints."""

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
