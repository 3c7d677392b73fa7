"""The tables of attention in docs/performance.md are those of the result files."""

import pytest

from benchmarks import results, sustained, tables
from benchmarks.cells import OURS

PLACES = ("forward", "gradients", "beside", "load")


def rows_of(cells, of_time, of_energy):
    """Rows of some cells: ours computes 600 TFLOP/s for 0.7 mJ a microsecond, FlashAttention-3 a part of it."""
    rows = []
    for cell in cells:
        for name in (OURS, tables.FLASH):
            us = cell.flops / 6e8 * (of_time if name == tables.FLASH else 1)
            millijoules = 0.7 * us * (of_energy / of_time if name == tables.FLASH else 1)
            shape = cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options
            origin = "1", "2026-11-20T12:00:00Z", "NVIDIA H200", "0.11.2", "abc1234"
            name = "mosaic" if name == OURS else name
            rows.append(results.Row(*origin, *shape, name, us, cell.bytes, cell.flops, None, 0.5, millijoules=millijoules))
    return rows


def test_the_document_has_the_tables_of_the_result_files():
    text = tables.DOCUMENT.read_text()
    assert tables.filled(text) == text, "run python -m benchmarks.tables"
    for machine in ("h200", "h100-80gb-hbm3"):
        for kind in PLACES:
            assert text.count(f"<!-- table: {machine} {kind} -->") == 1
    assert "| FlashAttention-3 | cuDNN |" in text


def test_a_place_is_filled_anew_and_is_empty_where_nothing_was_measured(tmp_path):
    place = "before\n\n<!-- table: h200 beside -->\n\n{}<!-- end of table -->\n\nafter"
    assert tables.filled(place.format("| of |\n|---|\n| old |\n\n"), tmp_path) == place.format("")
    cells = [cell for cell in sustained.cells() if cell.pass_ == "forward" and cell.shape == (1, 16384, 16, 128)]
    results.append(tmp_path / "h200" / "attention.csv", *rows_of(cells, 1.25, 1))
    filled = tables.filled(place.format(""), tmp_path)
    assert filled.startswith(
        "before\n\n<!-- table: h200 beside -->\n\n| head size, causal | forward | forward and backward |\n|---|"
    )
    assert "\n| 128, yes | -, -, 1.25 | -, -, - |\n" in filled
    assert filled.endswith("|\n\n<!-- end of table -->\n\nafter")
    assert tables.filled(filled, tmp_path) == filled


def test_the_command_fills_the_document(tmp_path, monkeypatch):
    text = tables.DOCUMENT.read_text()
    path = tmp_path / "performance.md"
    path.write_text(text.replace("| 256 | 512 |", "| 256 | 513 |"))
    monkeypatch.setattr(tables, "DOCUMENT", path)
    assert path.read_text() != text
    assert tables.main() == 0
    assert path.read_text() == text


def test_a_table_under_load(tmp_path):
    assert tables.KINDS["load"](tmp_path) == ""
    cells = [cell for cell in sustained.cells() if "held_out" not in cell.options]
    results.append(tmp_path / "attention_sustained.csv", *rows_of(cells, 1.1, 1.25))
    results.append(tmp_path / "attention_cool.csv", *rows_of(cells, 1.2, 1))
    caption, _, heads, line, *lines = tables.KINDS["load"](tmp_path).splitlines()
    assert caption.startswith("NVIDIA H200, lengths 4096 and 16384: TFLOP/s")
    assert {text.count("|") for text in (heads, line, *lines)} == {9}
    figures = "600, 600 | 545, 545 | 1.100, 1.100 | 0.800, 0.800 | 600, 600 | 500, 500 | 1.200, 1.200"
    assert lines[0] == f"| forward, 64, no | {figures} |"
    assert f"| forward and backward, 128, yes, 4 query heads a key head | {figures} |" in lines
    assert len(lines) == 2 * 7


def test_a_peer_that_was_not_measured_has_no_column(tmp_path):
    cells = [cell for cell in sustained.cells() if cell.pass_ == "forward" and cell.shape == (1, 16384, 16, 128)]
    rows = [row for row in rows_of(cells, 1.25, 1) if row.implementation == "mosaic" or not row.options]
    results.append(tmp_path / "attention.csv", *rows)
    heads, _, *lines = tables.KINDS["forward"](tmp_path).splitlines()
    assert heads == "| head size | length | jaxsoftmax | FlashAttention-3 | causal: jaxsoftmax |"
    assert "| | 16384 | 600 | 480 | 600 |" in lines
    assert "| 128 | 512 | - | - | - |" in lines


def test_a_place_of_an_unknown_kind():
    with pytest.raises(
        ValueError, match="<!-- table: h200 other -->: the kind must be one of forward, gradients, beside, load, functions"
    ):
        tables.filled("<!-- table: h200 other -->\n\n<!-- end of table -->")
