"""The tool that measures numerical errors."""

import jax
import numpy as np
import pytest

from benchmarks import errors


@pytest.mark.parametrize(
    ("actual", "truth", "magnitude", "expected"),
    [
        ([1 + 2.0**-23], [1.0], "value", [1.0]),
        ([2.0**-10 + 2.0**-33], [2.0**-10], "value", [1.0]),
        ([2.0**-10 + 2.0**-33], [2.0**-10], "value or 1", [2.0**-10]),
        ([[1.0, 2.0**-20]], [[1.0, 0.0]], "row", [[0.0, 8.0]]),
        ([[2.0**-20], [4.0]], [[0.0], [4.0]], "array", [[2.0], [0.0]]),
        ([0.0], [2.0**-126], "value", [2.0**-3]),  # flushed to 0
        ([np.nan], [1.0], "value", [np.inf]),
    ],
)
def test_an_error_is_in_units_in_the_last_place(actual, truth, magnitude, expected):
    found = errors.in_units(np.array(actual, np.float32), np.array(truth), "float32", magnitude)
    np.testing.assert_array_equal(found, expected)


def test_the_file_and_the_table_have_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(errors, "ROWS", (4, 64))
    file = tmp_path / "errors.csv"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for the counterparts
        only = "^(logsumexp|cross_entropy) (float32|bfloat16) (ordinary|offset)"
        assert errors.main(["--only", only, "--csv", str(file)]) == 0
    measured = capsys.readouterr().out
    assert errors.main(["--show", str(file)]) == 0
    assert capsys.readouterr().out == measured
    found = {(one.op, one.dtype, one.inputs, one.contender): one for one in errors.read(file)}
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert {one.implementation for one in found.values()} >= {"jax.nn", "optax"}
    assert found["cross_entropy", "float32", "offset", "jaxsoftmax"].largest < 8
    assert found["cross_entropy", "float32", "offset", "optax"].largest > 8
    assert "| cross_entropy, gradient | bfloat16 | " in measured
    with pytest.raises(SystemExit):
        errors.main(["--csv", str(file)])


def test_attention_and_its_truth_agree(monkeypatch):
    monkeypatch.setattr(errors, "ATTENTION", (1, 16, 2, 8))
    attention = [case for case in errors.cases() if case.name == "dot_product_attention float32 outliers"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = errors.measure(attention)
    assert [one.op for one in found[:2]] == ["dot_product_attention", "dot_product_attention, gradient"]
    assert all(one.largest < 2**10 for one in found)  # of TF32, on a GPU
