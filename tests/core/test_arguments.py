"""Every argument of every public function, given every kind of wrong value: the error names both, and says what came."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import rl
from jaxsoftmax.flax import attention_fn, attention_fn_with_rope

pytestmark = pytest.mark.usefixtures("hollow_kernels", "standard_promotion_all")


class Something:
    """Neither an array nor a function."""


# Made of a traced float32, where they are traced.
VALUES = {
    "None": lambda traced: None,
    "text": lambda traced: "text",
    "True": lambda traced: True,
    "an int": lambda traced: 1,
    "a float": lambda traced: 0.5,
    "nan": lambda traced: float("nan"),
    "a complex number": lambda traced: 1j,
    "a huge int": lambda traced: 10**400,
    "a traced float": lambda traced: traced,
    "a traced bool": lambda traced: traced > 0,
    "a traced array": lambda traced: jnp.ones((2, 3)) * traced,
    "a list of traced floats": lambda traced: [traced, traced],
    "a key": lambda traced: jax.random.key(0),
    "keys": lambda traced: jax.random.split(jax.random.key(0)),
    "objects": lambda traced: np.array([object()]),
    "an array of text": lambda traced: np.array(["a"]),
    "a date": lambda traced: np.datetime64("2020-01-01"),
    "a long double": lambda traced: np.longdouble(1),
    "long doubles": lambda traced: np.zeros((2, 3), np.longdouble),
    "long double": lambda traced: np.longdouble,
    "the dtype of keys": lambda traced: jax.random.key(0).dtype,
    "float32": lambda traced: np.float32,
    "int32": lambda traced: np.int32,
    "floats": lambda traced: [1.0, 2.0],
    "ints": lambda traced: [0, 1],
    "bools": lambda traced: (True, False),
    "a ragged list": lambda traced: [[1], [2, 3]],
    "a token": lambda traced: jax.lax.create_token(),
    "a dict": lambda traced: {"a": 1},
    "something": lambda traced: Something(),
    "0-d bool": lambda traced: np.array(True),
    "0-d bool of JAX": lambda traced: jnp.array(True),
    "0-d int": lambda traced: np.array(1),
    "0-d int of JAX": lambda traced: jnp.array(1),
    "five axes": lambda traced: np.zeros((2, 3, 5, 7, 4), np.float32),
    "bools of another shape": lambda traced: np.zeros((5, 7), bool),
    "ints of another shape": lambda traced: np.zeros((5, 7), np.int32),
    "complex numbers": lambda traced: np.zeros((5, 7), np.complex64),
    "no tangents": lambda traced: np.zeros((2, 3), jax.dtypes.float0),
}
NUMBERS = {"an int", "a float", "nan", "0-d int", "0-d int of JAX"}
TRACED = {"a traced float", "a traced bool", "a traced array"}
BOOLS = {"True", "0-d bool", "0-d bool of JAX"}
ARRAYS = {"five axes", "ints of another shape", "complex numbers", "a traced array"}
ANYTHING = {"a complex number", "bools of another shape"} | NUMBERS | TRACED | BOOLS | ARRAYS
TRACEABLE = ANYTHING | {
    "None",
    "a list of traced floats",
    "a key",
    "keys",
    "floats",
    "ints",
    "bools",
    "a ragged list",
    "a token",
    "a dict",
    "a date",
    "a long double",
    "no tangents",
}  # for a function that does nothing with it
FUNCTIONS = {"float32", "int32", "long double"}  # what they return is theirs to say

X = np.zeros((2, 3), np.float32)
SQUARE = np.zeros((2, 2), np.float32)
Q = np.zeros((2, 6, 4, 8), np.float32)
QKV = {"query": Q, "key": Q, "value": Q}
SEGMENTS = {"query_segment_ids": np.zeros((2, 6), np.int32)}
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}

# The function, the arguments that it needs, and for each argument the values above that are right.
SOFTMAX = {
    "x": ARRAYS,
    "axis": {"None", "an int", "ints", "0-d int", "0-d int of JAX"},
    "where": {"None", "a traced bool"} | BOOLS,
    "scale": {"None", "a traced float"} | NUMBERS,
    "dtype": {"None", "float32"},
    "axis_name": {"None"},
    "implementation": {"None"},
}
LOGSUMEXP = {name: SOFTMAX[name] for name in ("axis", "where", "scale", "axis_name", "implementation")} | {
    "a": ANYTHING,
    "b": {"None", "a complex number"} | NUMBERS | TRACED | BOOLS,
    "keepdims": BOOLS,
    "return_sign": BOOLS,
}
ATTENTION = {
    "bias": {"None", "a float", "nan", "a traced float"},
    "mask": {"None", "a traced bool"} | BOOLS,
    "scale": {"None", "an int", "a float", "a long double", "a traced float", "0-d int", "0-d int of JAX"},
    "query_seq_lengths": {"None", "ints"},
    "key_value_seq_lengths": {"None", "ints"},
    "local_window_size": {"None", "an int", "a huge int", "ints", "0-d int", "0-d int of JAX"},
    "query_offset": {"None", "an int", "ints", "0-d int", "0-d int of JAX"},
    "query_segment_ids": {"None"},
    "key_value_segment_ids": {"None"},
    "logits_soft_cap": {"None", "an int", "a float", "a long double", "0-d int", "0-d int of JAX"},
    "sinks": {"None"},
    "key_scale": {"None"},
    "value_scale": {"None"},
    "dropout_rate": {"a float"},
    "dropout_rng": {"a key"},
    "fully_masked_rows": set(),
    "score_mod": {"None"},
    "mask_mod": {"None"},
    "parallel": {"None"},
    "implementation": {"None"},
    "precision": {"None"},
} | dict.fromkeys(("is_causal", "broadcast_dropout", "deterministic", "deterministic_gradients", "return_residual"), BOOLS)
INTS = {"an int", "0-d int", "0-d int of JAX"}
ORDER = {"x": {"five axes", "a traced array"}, "n": INTS, "axis": INTS}
FLAX = {name: ATTENTION[name] for name in inspect.signature(attention_fn).parameters if name in ATTENTION} | {
    "mask": {"None", "a complex number", "a traced float", "a traced bool"} | NUMBERS | BOOLS,
    "dtype": {"None", "float32"},
    "module": {"None"},
    "force_fp32_for_softmax": BOOLS,
    "einsum_dot_general": {"None"},
    "qk_attn_weights_einsum": {"None"},
    "attn_weights_value_einsum": {"None"},
    "promote_dtype": {"None"} | FUNCTIONS,
}
OPERANDS = {name: set() for name in QKV}
PAGES = dict.fromkeys(("key_pages", "value_pages"), np.zeros((5, 3, 4, 8), np.float32)) | {
    "page_table": np.zeros((2, 2), np.int32)
}
PAGED = {"query": Q} | PAGES | {"key_value_seq_lengths": np.ones(2, np.int32)}
OF_PAGED = ("bias", "mask", "scale", "is_causal", "local_window_size", "query_offset", "logits_soft_cap", "sinks", "precision")
SCALES = {"key_scale": {"None"}, "value_scale": {"None"}}
OF_PAGED = (
    {name: ATTENTION[name] for name in (*OF_PAGED, "score_mod", "mask_mod", "implementation")}
    | {"key_value_seq_lengths": {"ints"}, "return_lse": BOOLS}
    | SCALES
)
WRITTEN = PAGES | {"key": Q, "value": Q, "positions": np.ones(2, np.int32)}
ROPE = {"input_positions": {"None"} | NUMBERS | BOOLS | {"a traced float", "a traced bool"}, "rope": FUNCTIONS}


SIZES = {"an int", "0-d int", "0-d int of JAX"}
TOP_K = {"k": SIZES, "axis": SIZES}
TOP_K |= {name: SOFTMAX[name] for name in ("where", "implementation")}
REAL = {"five axes", "ints of another shape", "a traced array"}
SOFTMAX_TOP_K = TOP_K | {"logits": REAL, "scale": SOFTMAX["scale"], "normalize": set(), "return_lse": BOOLS}
SHARE = {"None", "an int", "a float", "a long double", "a traced float", "0-d int", "0-d int of JAX", "ints"}
CATEGORICAL = {name: SOFTMAX_TOP_K[name] for name in ("logits", "axis", "where", "implementation")} | {
    "key": {"a key"},
    "shape": {"None"},
    "temperature": SHARE | {"floats"},
    "top_k": {"None", "an int", "a huge int", "0-d int", "0-d int of JAX", "ints"},
    "top_p": SHARE | {"nan"},
    "min_p": SHARE | {"nan"},
    "return_log_prob": BOOLS,
    "out_sharding": {"None"},
}


WEIGHT = SHARE - {"None", "ints"} | {"nan"}
CONCRETE = WEIGHT - {"nan", "a traced float"}
TOKENS = {"a traced array"}
MASK = {"None", "a traced bool"} | BOOLS
POLICY = {"log_p": X, "old_log_p": X, "advantages": X, "reference_log_p": X, "entropy": X}
PAIR = {"chosen_log_p": X, "rejected_log_p": X}
REFERENCES = {f"reference_{name}": X for name in PAIR}
OF_PAIRS = dict.fromkeys(PAIR, TOKENS) | {"chosen_where": MASK, "rejected_where": MASK}


@functools.cache
def untraced(kind):
    return VALUES[kind](None)


def explained(**arguments):
    return jaxsoftmax.explain(arguments.pop("f"), arguments.pop("x"), **arguments)


CALLS = {
    "softmax": (jaxsoftmax.softmax, {"x": X}, SOFTMAX),
    "log_softmax": (jaxsoftmax.log_softmax, {"x": X}, SOFTMAX),
    "logsumexp": (jaxsoftmax.logsumexp, {"a": X}, LOGSUMEXP),
    "top_k": (jaxsoftmax.top_k, {"operand": X, "k": 2}, TOP_K | {"operand": REAL}),
    "softmax_top_k": (jaxsoftmax.softmax_top_k, {"logits": X, "k": 2}, SOFTMAX_TOP_K),
    "categorical": (jaxsoftmax.categorical, {"key": jax.random.key(0), "logits": X}, CATEGORICAL),
    "dot_product_attention": (jaxsoftmax.dot_product_attention, QKV, OPERANDS | ATTENTION),
    "block_mask": (
        jaxsoftmax.block_mask,
        {"mask_mod": lambda b, h, q, k: q >= k, "query_length": 64},
        {"mask_mod": set(), "query_length": SIZES} | dict.fromkeys(("key_length", "batch", "heads"), {"None"} | SIZES),
    ),
    "paged_attention": (jaxsoftmax.cache.paged_attention, PAGED, {name: set() for name in PAGED} | OF_PAGED),
    "zigzag": (jaxsoftmax.zigzag, {"x": SQUARE, "n": 1}, ORDER),
    "unzigzag": (jaxsoftmax.unzigzag, {"x": SQUARE, "n": 1}, ORDER),
    "update_pages": (
        jaxsoftmax.cache.update_pages,
        WRITTEN,
        {name: set() for name in WRITTEN} | {"positions": {"ints"}} | SCALES,
    ),
    "quantize": (
        jaxsoftmax.cache.quantize,
        {"x": X, "scale": np.float32(1), "dtype": "int8"},
        {"x": {"five axes", "a traced array"}, "scale": {"a float", "nan", "a traced float"}, "dtype": set()},
    ),
    "policy_gradient_loss": (
        rl.policy_gradient_loss,
        POLICY,
        {name: TOKENS | ({"None"} if name not in ("log_p", "advantages") else set()) for name in POLICY}
        | {"clip": CONCRETE | {"floats", "ints"}, "where": MASK, "reduction": set()}
        | {"kl_weight": WEIGHT, "entropy_weight": WEIGHT},
    ),
    "linear_policy_gradient_loss": (
        rl.linear_policy_gradient_loss,
        {"hidden": np.zeros((2, 3, 4), np.float32), "weight": np.zeros((4, 5), np.float32)}
        | {"tokens": np.zeros((2, 3), np.int32)}
        | dict.fromkeys(("old_log_p", "advantages", "reference_log_p"), X),
        {name: set() for name in ("hidden", "weight", "tokens", "reduction")}
        | {"old_log_p": TOKENS | {"None"}, "advantages": TOKENS, "reference_log_p": TOKENS | {"None"}, "where": MASK}
        | {"clip": CONCRETE | {"floats", "ints"}, "kl_weight": WEIGHT, "bias": {"None", "a float", "nan", "a traced float"}}
        | {"temperature": WEIGHT - {"nan", "a long double"} | {"None", "a traced array"}, "class_axis": SIZES}
        | {"logits_soft_cap": ATTENTION["logits_soft_cap"], "axis_name": {"None"}, "implementation": {"None"}},
    ),
    "group_advantages": (
        rl.group_advantages,
        {"rewards": X},
        {"rewards": REAL | {"bools of another shape"}, "axis": SIZES, "normalize": BOOLS, "eps": CONCRETE},
    ),
    "dpo_loss": (
        rl.dpo_loss,
        PAIR | REFERENCES,
        OF_PAIRS | dict.fromkeys(REFERENCES, TOKENS) | {"beta": WEIGHT, "label_smoothing": CONCRETE},
    ),
    "simpo_loss": (rl.simpo_loss, PAIR, OF_PAIRS | {"beta": WEIGHT, "gamma": WEIGHT}),
    "orpo_loss": (rl.orpo_loss, PAIR, OF_PAIRS | {"odds_weight": WEIGHT}),
    "attention_fn": (attention_fn, QKV, OPERANDS | FLAX),
    "attention_fn_with_rope": (attention_fn_with_rope, QKV | {"rope": lambda x, _=None: x}, OPERANDS | ROPE),
    "explain": (
        explained,
        {"f": lambda _: jaxsoftmax.softmax(X), "x": X},
        {"f": FUNCTIONS, "x": TRACEABLE, "platform": {"None"}},
    ),
}
TOGETHER = {"dropout_rng": DROPOUT, "dropout_rate": DROPOUT, "broadcast_dropout": DROPOUT, "key_value_segment_ids": SEGMENTS}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_in_the_table(name):
    function, _, right = CALLS[name]
    if function not in (explained, attention_fn_with_rope):  # which hand on others to a function
        assert set(right) == set(inspect.signature(function).parameters)


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name, call in CALLS.items() for argument in call[2]])
def test_wrong_values_are_named_and_right_ones_taken(name, argument):
    function, needed, right = CALLS[name]

    def call(value):
        function(**needed | TOGETHER.get(argument, {}) | {argument: value})

    raised = {}
    for kind in VALUES:
        if kind in FUNCTIONS and right[argument] >= FUNCTIONS:
            continue
        try:
            if "traced" in kind:
                jax.eval_shape(lambda traced, kind=kind: call(VALUES[kind](traced)), 1.0)
            elif kind in right[argument] and function is not explained:  # a call that compiles nothing, then
                jax.eval_shape(functools.partial(call, untraced(kind)))
            else:
                call(untraced(kind))
        except Exception as error:  # whatever it is
            raised[kind] = error
    assert set(raised) == set(VALUES) - right[argument]
    for kind, error in raised.items():
        assert type(error) in (TypeError, ValueError), kind
        message = str(error)
        # An argument that is handed on is named by the function that takes it.
        by = ("attention_fn_with_rope", "attention_fn", "dot_product_attention") if name.startswith("attention_fn") else (name,)
        assert message.partition(":")[0] in by, (kind, message)
        assert (argument if (name, argument) != ("explain", "x") else "args[0]") in message, (kind, message)
        assert "got" in message or "allowed are" in message, (kind, message)
