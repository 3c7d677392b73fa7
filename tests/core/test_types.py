"""What type checkers see of the public functions: the types of results that depend on a bool, and wrong arguments."""

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxsoftmax

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).with_name("typed_calls.py")
OPTIONS = {
    node.name: node
    for node in ast.parse((ROOT / "jaxsoftmax/ops/options.pyi").read_text()).body
    if isinstance(node, ast.ClassDef)
}
OVERLOADED = {
    function.__name__: function
    for function in (
        jaxsoftmax.logsumexp,
        jaxsoftmax.cross_entropy,
        jaxsoftmax.linear_cross_entropy,
        jaxsoftmax.log_probs,
        jaxsoftmax.linear_log_probs,
        jaxsoftmax.softmax_top_k,
        jaxsoftmax.categorical,
        jaxsoftmax.dot_product_attention,
        jaxsoftmax.cache.paged_attention,
    )
}


def keys(name: str) -> list[str]:
    """Returns the keys of a TypedDict of `options.pyi`, with those of the classes that it extends."""
    if name not in OPTIONS:
        return []
    inherited = [key for base in OPTIONS[name].bases for key in keys(ast.unparse(base))]
    return inherited + [item.target.id for item in OPTIONS[name].body if isinstance(item, ast.AnnAssign)]


def overloads(function) -> list[ast.FunctionDef]:
    tree = ast.parse(Path(inspect.getsourcefile(function)).read_text())
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__]
    return [node for node in named if node.decorator_list]


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_take_the_arguments_of_the_function(name):
    expected = list(inspect.signature(OVERLOADED[name]).parameters)
    found = overloads(OVERLOADED[name])
    assert len(found) == 2
    for overload in found:
        arguments = [argument.arg for argument in (*overload.args.args, *overload.args.kwonlyargs)]
        if overload.args.kwarg is not None:
            arguments += keys(re.fullmatch(r"Unpack\[(\w+)\]", overload.args.kwarg.annotation.value)[1])
        assert sorted(arguments) == sorted(expected)


def test_a_type_checker_sees_the_types_of_results_and_refuses_wrong_arguments():
    command = [str(Path(sys.executable).with_name("pyrefly")), "check", "--output-format", "json", "--preset", "default"]
    command += ["--python-interpreter-path", sys.executable, "--search-path", str(ROOT), str(CALLS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = {error["line"] for error in json.loads(run.stdout)["errors"]}
    lines = CALLS.read_text().splitlines()
    assert errors == {number for number, line in enumerate(lines, 1) if line.endswith("# error")}, run.stdout + run.stderr
