"""The cells of attention with score and mask functions, each beside the arguments that mean the same.

The option `functions` names what the functions of a cell compute. The contender `arguments` is ours with arguments in place of
functions, and `flex_attention` is torch's, compiled. Beside `alibi` stands `plain`, ours without a bias. Beside `relative`, a
table with one number for each head and distance, stands `bias`, ours with a whole bias that is made of the table before.
Gradients of the table, or of the whole bias, count. Beside `prefix_window`, the last `WINDOW` keys and the first `PREFIX`,
stands `causal`, ours without a function, which visits the blocks between them too. Beside `documents` stands
`with_block_mask`, the same call with a `BlockMask` that was made before.

Cells of the op `block_mask` measure how long ours takes to make one of documents, beside `attention`, the forward pass with it,
and beside torch's `create_block_mask`, compiled.

Values are checked like those of the same call with arguments. For functions that no arguments mean, and the gradients of
`soft_cap`, the results of some queries are compared.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention
from benchmarks.attention import HIDDEN, SOFT_CAP, TOKENS, WINDOW, Call
from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import sampled, to_torch
from jaxsoftmax import BlockMask, block_mask
from tests.support import oracle
from tests.support.attention import oracle as attention_oracle

LENGTHS, HEAD_SIZE = (4096, 16384), 128
PREFIX = 64  # first keys that all queries see
LONGEST_BIAS = 4096  # a whole bias of 16384 tokens and 16 heads has 8.6 GB, and so has its gradient


@dataclass(frozen=True)
class Functions:
    """The score and mask functions of a cell.

    Attributes:
      options: of the `Call` whose arguments mean the same.
      score_mod, mask_mod: from the call and its inputs behind the values, the function for JAX and for torch alike, or None;
        `xp` has `where` and `tanh`.
    """

    options: dict[str, Any]
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def slopes(heads: int) -> np.ndarray:
    """The slopes of ALiBi, float32 `[heads]`."""
    return np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)


def _alibi(call: Call, xp: Any, extras: Sequence[Any]) -> Callable[..., Any]:
    own, floating = extras[0], (lambda x: x.astype(jnp.float32)) if xp is jnp else (lambda x: x)
    return lambda score, b, h, q, k: score - own[h] * floating(q - k)


def _relative(call: Call, xp: Any, extras: Sequence[Any]) -> Callable[..., Any]:
    table, last = extras[0], call.length - 1
    return lambda score, b, h, q, k: score + table[h, q - k + last]


def _documents(call: Call, xp: Any, extras: Sequence[Any]) -> Callable[..., Any]:
    own, others = extras[0]
    return lambda b, h, q, k: own[b, q] == others[b, k]


def _prefix_window(call: Call, xp: Any, extras: Sequence[Any]) -> Callable[..., Any]:
    return lambda b, h, q, k: (q >= k) & ((k < PREFIX) | (q - k < min(WINDOW, call.length // 4)))


FUNCTIONS = {
    "causal": Functions({"causal": True}, mask_mod=lambda call, xp, extras: lambda b, h, q, k: q >= k),
    "window": Functions(
        {"causal": True, "window": WINDOW},
        mask_mod=lambda call, xp, extras: lambda b, h, q, k: (q >= k) & (q - k < call.window),
    ),
    "documents": Functions({"extras": ("segments",)}, mask_mod=_documents),
    "soft_cap": Functions(
        {"soft_cap": SOFT_CAP},
        score_mod=lambda call, xp, extras: lambda s, b, h, q, k: SOFT_CAP * xp.tanh(s / SOFT_CAP),
    ),
    "prefix_window": Functions({}, mask_mod=_prefix_window),
    "alibi": Functions({}, score_mod=_alibi),
    "relative": Functions({}, score_mod=_relative),
}


def cells(tokens: int = TOKENS, hidden: int = HIDDEN) -> list[Cell]:
    """All cells; with fewer tokens or a smaller hidden size, smaller ones."""
    lengths, heads = sorted({min(length, tokens) for length in LENGTHS}), max(hidden // HEAD_SIZE, 1)
    masks = [mask_cell(Call(tokens // length, length, heads, HEAD_SIZE, **_options("documents", length))) for length in lengths]
    return masks + [
        cell_of(name, Call(tokens // length, length, heads, HEAD_SIZE, backward=backward, **_options(name, length)))
        for backward in (False, True)
        for length in lengths
        for name in FUNCTIONS
        if name != "relative" or length <= LONGEST_BIAS
    ]


def _options(name: str, length: int) -> dict[str, Any]:
    options = FUNCTIONS[name].options
    return options | ({"window": min(WINDOW, length // 4)} if "window" in options else {})


def cell_of(name: str, call: Call) -> Cell:
    """Returns the cell of the functions `name` for a call whose arguments mean the same, if there are such arguments."""
    cell, functions = attention.cell_of(call), FUNCTIONS[name]
    ours = Contender(OURS, lambda: _measured(call, name, _of_ours(name, call)))
    flex = Contender(
        "flex_attention",
        lambda: _of_torch(functions, call, name),
        prepare=functools.partial(_for_torch, call, name),
        framework="torch",
        needs=("torch",),
    )
    cell = replace(cell, options=" ".join(filter(None, (cell.options, f"functions={name}"))))
    if name not in ("alibi", "relative", "prefix_window"):
        arguments = replace(attention.of_ours(call), name="arguments")
        if call.soft_cap is not None and call.backward:  # there is no truth of the gradients of keys and values
            whole: Any = cell.sample
            cell = replace(cell, sample=lambda inputs, output: whole(inputs, output)[:1])
        if name != "documents":
            return replace(cell, contenders=(ours, arguments, flex))
        made = replace(_of_block_mask(call), name="with_block_mask")
        return replace(cell, contenders=(ours, arguments, made, flex))
    sample = functools.partial(_sample, call, name)
    inputs = functools.partial(_inputs, call, name)
    if name == "alibi":
        plain = Contender(
            "plain",
            lambda: attention.of_ours(call).build(),
            prepare=lambda query, key, value, _, *dout: (query, key, value, *dout),
            sample=functools.partial(_sample_of_plain, cell.sample),
        )
        contenders = (ours, plain, flex)
    elif name == "prefix_window":
        causal = replace(call, causal=True)
        beside = attention.cell_of(causal)
        plain = replace(attention.of_ours(causal), name="causal", sample=beside.sample)
        return replace(cell, sample=sample, fewer=attention._none_fewer, contenders=(ours, plain, flex))
    else:
        whole = replace(call, extras=("bias",))
        bias = Contender("bias", lambda: attention.of_ours(whole).build(), prepare=functools.partial(_with_bias, call))
        contenders = (ours, bias, flex)
    fewer = attention._none_fewer if call.backward else _fewer
    return replace(cell, inputs=inputs, sample=sample, fewer=fewer, contenders=contenders)


def mask_cell(call: Call) -> Cell:
    """Returns the cell of a block mask of documents, for attention of a call."""
    cell = attention.cell_of(call)

    def make(query: Any, key: Any, value: Any, segments: Any) -> Any:
        return _block_mask(call, segments).kinds

    def prepare(*inputs: Any) -> tuple[Any, ...]:
        own, others = to_torch(*inputs[3])
        return own, others

    def build() -> Callable[..., Any]:
        module = importlib.import_module("torch.nn.attention.flex_attention")
        create = torch().compile(module.create_block_mask, dynamic=False)

        def run(own: Any, others: Any) -> Any:
            mask_mod = _documents(call, torch(), ((own, others),))
            mask = create(mask_mod, call.batch, None, call.length, call.length, device="cuda")
            return mask.kv_num_blocks + mask.full_kv_num_blocks

        return run

    contenders = (
        Contender(OURS, lambda: make),
        replace(_of_block_mask(call), name="attention", sample=cell.sample),
        Contender("flex_attention", build, prepare, framework="torch", needs=("torch",), sample=lambda inputs, output: []),
    )
    sample, options = functools.partial(_sample_of_kinds, call), f"{cell.options} functions=documents"
    numbers = 2 * call.batch * call.length * 4 + call.batch * math.ceil(call.length / 64) ** 2
    return replace(
        cell,
        op="block_mask",
        options=options,
        bytes=numbers,
        flops=0,
        blocks=0,
        sample=sample,
        fewer=attention._none_fewer,
        contenders=contenders,
    )


def _block_mask(call: Call, segments: Any) -> BlockMask:
    """Makes the block mask of documents."""
    return block_mask(_documents(call, jnp, (segments,)), call.length, batch=call.batch)


def _of_block_mask(call: Call) -> Contender:
    """Returns the contender that attends with a block mask of documents, which is made before."""

    def prepare(query: Any, key: Any, value: Any, segments: Any, *dout: Any) -> tuple[Any, ...]:
        return query, key, value, _block_mask(call, segments), *dout

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return library.dot_product_attention(query, key, value, mask_mod=mask)

    return Contender("block_mask", lambda: _measured(call, "documents", attend), prepare)


# Inputs.


def _inputs(call: Call, name: str, key: Any, hurtful: bool) -> tuple[Any, ...]:
    """Query, key and value, the slopes or the table, and the cotangent of the output."""
    query, k, value, *dout = attention._inputs(call, key, hurtful)
    if name == "alibi":
        own = jnp.asarray(slopes(call.heads))
    else:
        own = jax.random.normal(jax.random.fold_in(key, 3), (call.heads, 2 * call.length - 1)).astype(call.dtype)
    return query, k, value, own, *dout


def _with_bias(call: Call, query: Any, key: Any, value: Any, table: Any, *dout: Any) -> tuple[Any, ...]:
    """Makes a whole bias of a table."""
    positions = np.arange(call.length)
    return query, key, value, table[None, :, positions[:, None] - positions + call.length - 1], *dout


# Whether it is right.


def _sample(call: Call, name: str, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some queries of one head of the last batch entry, or their gradients, and the truth of them."""
    query, key, value, *others = inputs
    own, *dout = others if name != "prefix_window" else (None, *others)
    b, head, at = call.batch - 1, call.heads // 2, sampled(call.length, **(attention._FEWER if call.backward else {}))
    arrays, given = attention._of_queries(call, (query, key, value), [b], head, at)
    distances = at[:, None] - np.arange(call.length)
    if name == "prefix_window":
        keys = np.arange(call.length)
        bias = np.where((distances >= 0) & ((keys < PREFIX) | (distances < min(WINDOW, call.length // 4))), 0, -np.inf)
    else:
        numbers = np.asarray(own, np.float32)
        bias = -numbers[head] * distances if name == "alibi" else numbers[head][distances + call.length - 1]
    given["bias"] = bias.astype(np.float32)[None, None]
    if not call.backward:
        return [(attention._some(output, [b], head, at), attention_oracle.attention(*arrays, **given)[0])]
    douts = attention._some(dout[0], [b], head, at)
    truths = attention_oracle.cotangents(douts, np.zeros(douts.shape[:-1]), *arrays, **given)
    return [(attention._some(output[0], [b], head, at), truths["query"])]


def _sample_of_kinds(call: Call, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some rows of blocks of the last batch entry, and what all pairs of a query and a key say of them."""
    own, others = (np.asarray(ids)[-1] for ids in inputs[3])
    at = sampled(-(-call.length // 64), 4, 4)
    truth = []
    for row in at:
        seen = own[64 * row : 64 * (row + 1), None] == others
        blocks = np.pad(seen, [(0, 0), (0, -seen.shape[1] % 64)], mode="edge").reshape(len(seen), -1, 64)
        truth.append(blocks.any((0, 2)).astype(np.float64) + blocks.all((0, 2)))
    return [
        (
            np.asarray(output)[-1, 0, at].astype(np.float64),
            oracle.Truth(np.stack(truth), np.full((len(at), len(truth[0])), 0.5)),
        )
    ]


def _fewer(inputs: Sequence[Any], output: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """A call with the first batch entry's first queries alone."""
    query, key, value, own = inputs
    few = slice(attention._FEW_QUERIES)
    return [(f"{few.stop} queries", (query[:1, few], key[:1], value[:1], own), output[:1, few])]


def _sample_of_plain(sample: Any, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    query, key, value, _, *dout = inputs
    return sample((query, key, value, *dout), output)


# Contenders.


def _of_ours(name: str, call: Call) -> Callable[..., Any]:
    functions = FUNCTIONS[name]

    def attend(query: Any, key: Any, value: Any, *extras: Any) -> Any:
        made = {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod}
        given = {which: make(call, jnp, extras) for which, make in made.items() if make is not None}
        return library.dot_product_attention(query, key, value, **given)

    return attend


def _measured(call: Call, name: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a cell's inputs: attention, or the gradients of query, key, value and a table."""
    if not call.backward:
        return attend
    count = 3 + (name == "relative")

    def gradients(*inputs: Any) -> Any:
        *operands, dout = inputs
        varied, others = operands[:count], operands[count:]
        return jax.vjp(lambda *varied: attend(*varied, *others), *varied)[1](dout)

    return gradients


def _for_torch(call: Call, name: str, *inputs: Any) -> tuple[Any, ...]:
    """The inputs for torch, heads before tokens; those that have gradients ask for them."""
    count = 3 + (name == "relative")
    operands, others = list(inputs[:3]), list(inputs[3:])
    dout = [others.pop()] if call.backward else []
    if name == "documents":
        others = list(others[0])
    arrays = [array.transpose(1, 2) for array in attention.to_torch(*operands, *dout)]
    extras = attention.to_torch(*others) if others else ()
    varied = [*arrays[:3], *extras]
    if call.backward:
        varied = [x.detach().requires_grad_() if i < count else x for i, x in enumerate(varied)]
    return (*varied, *arrays[3:])


def _of_torch(functions: Functions, call: Call, name: str) -> Callable[..., Any]:
    """Torch's FlexAttention, compiled, with the mask's blocks made before."""
    module = importlib.import_module("torch.nn.attention.flex_attention")
    torch().compiler.reset()  # it compiles a function for at most eight cells, and would run the others without fusions
    compiled = torch().compile(module.flex_attention, dynamic=False)
    masks: dict[str, Any] = {}

    def attend(query: Any, key: Any, value: Any, *extras: Any) -> Any:
        pairs = (extras,) if name == "documents" else extras
        given = {}
        if functions.mask_mod is not None:
            if "mask" not in masks:
                mask_mod = functions.mask_mod(call, torch(), pairs)
                batch = call.batch if name == "documents" else None
                masks["mask"] = module.create_block_mask(mask_mod, batch, None, call.length, call.length, device="cuda")
            given["block_mask"] = masks["mask"]
        if functions.score_mod is not None:
            given["score_mod"] = functions.score_mod(call, torch(), pairs)
        return compiled(query, key, value, **given)

    if not call.backward:
        return lambda *inputs: attend(*inputs).transpose(1, 2)
    count = 3 + (name == "relative")

    def run(*inputs: Any) -> Any:
        *operands, dout = inputs
        gradients = torch().autograd.grad(attend(*operands), operands[:count], dout)
        return (*(gradient.transpose(1, 2) for gradient in gradients[:3]), *gradients[3:])

    return run
