"""Variants of the settings of attention's kernels, which `python -m benchmarks.variants` times."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import harness, variants
from benchmarks.cells import OURS, Contender
from jaxsoftmax.ops.attention.mosaic_sm90 import backward_plan, forward_plan
from tests.support.attention import lowering


def test_settings_are_literals_and_names_of_corrections():
    variant = variants.parse("wide=forward: block_kv=192, own_output=False, correction=FROM_PRODUCT")
    correction = forward_plan.Correction.FROM_PRODUCT
    assert (variant.name, variant.kernel) == ("wide", "forward")
    assert variant.settings == {"block_kv": 192, "own_output": False, "correction": correction}
    assert variants.parse("few=backward: stages=(2, 2)").settings == {"stages": (2, 2)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("block_kv=64", "NAME=forward"),
        ("a=sideways: block_kv=64", "NAME=forward"),
        ("a=forward: 64", "FIELD=VALUE"),
        ("a=forward: block_kv=open", "FIELD=VALUE"),
        ("a=forward: blok=64", "no setting blok of ForwardConfig; choose from consumers"),
        ("a=backward: block_kv=64", "no setting block_kv of BackwardConfig"),
    ],
)
def test_bad_variants(text, said, capsys):
    with pytest.raises(SystemExit):
        variants.main([text])
    assert said in capsys.readouterr().err


def test_the_library_chooses_a_variant_inside_of_its_context_alone():
    usual = forward_plan.forward_config(128, 128), backward_plan.backward_config(128, 128)
    with variants.parse("few=forward: block_kv=64").chosen():
        assert forward_plan.forward_config(128, 128).block_kv == 64
        assert lowering.lower(lowering.operands(size=128)).count("attention_forward_mosaic") > 0
    with variants.parse("few=backward: stages=(2, 2)").chosen():
        assert backward_plan.backward_config(128, 128)[1].stages == (2, 2)
        assert backward_plan.backward_config(128, 128)[0] == 128
    assert (forward_plan.forward_config(128, 128), backward_plan.backward_config(128, 128)) == usual


def test_a_function_is_compiled_in_its_context_once_for_each_type():
    entered = []

    class Noted:
        def __enter__(self):
            entered.append(None)

        def __exit__(self, *problem):
            pass

    function = variants._Compiled(lambda x: x + 1, Noted)
    for size in (2, 2, 3):
        assert function(jnp.ones(size)).shape == (size,)
    assert len(entered) == 2
    assert jax.eval_shape(function, jnp.ones(5)).shape == (5,)
    assert len(entered) == 2


def test_a_cell_has_variants_beside_ours_and_the_peers():
    cell = variants.sustained.cool_cells()[0]
    changed = variants.with_variants(cell, [variants.parse("few=forward: stages=2")])
    assert [c.name for c in changed.contenders] == [*(c.name for c in cell.contenders), "few"]
    assert changed.contenders[0].name == OURS
    assert isinstance(changed.contenders[-1].build(), variants._Compiled)
    assert isinstance(changed.contenders[-1], Contender)


def test_without_a_gpu_there_is_nothing_to_measure(capsys, monkeypatch):
    monkeypatch.setattr(harness, "gpu_name", lambda: None)
    assert variants.main(["--only", "x128 causal=1$"]) == 2
    assert "no GPU" in capsys.readouterr().err
