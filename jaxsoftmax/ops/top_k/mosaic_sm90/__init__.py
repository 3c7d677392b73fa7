"""The k largest entries of rows, and samples from rows, on Hopper, for rows of any length.

Samples are in `sampling`, and rows of up to 512 columns, of which there may be millions, in `short_rows` and `short_gradient`.
Else a block, or the blocks of a cluster, go through a row in sweeps of a few thousand elements, each read once. What is above a
bound goes to a list in shared memory (see `candidates`). The first bound comes from the first sweep: the k-th largest of the
maxima of its threads. Whenever the list is long it is cut to the k largest, and the bound raised. The blocks of a cluster send
their lists to the first one, which cuts them to one list, sorts and stores it. So of each element 4 bytes are read, or 2, and
no more than the k entries are written.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 4, for softmax and top-k in one pass.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.plan import RowPlan, Storage
from jaxsoftmax.ops.softmax import mosaic_sm90 as of_softmax
from jaxsoftmax.ops.softmax.mosaic_sm90 import select
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP, LOGSUMEXP_VJP
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem
from jaxsoftmax.ops.top_k import xla
from jaxsoftmax.ops.top_k.mosaic_sm90 import sampling, short_gradient, short_rows, staged
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import HEAD, Candidates, Places
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import Plan, Row, States, choose, copied_of, launched, meet, plan_of, start

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int16", "uint16", "int8", "uint8")
MOST = 1024  # entries of a row that are found


# What is served.


def unsupported(primitive, target, operands, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] != 9:
        return f"it needs compute capability 9.x, got {target.platform} {target.compute_capability}"
    if primitive == "softmax_top_k_vjp":
        return _unsupported_vjp(target, operands, **params)
    x = operands["x"]
    names = DTYPES if primitive == "top_k" else DTYPES[:3]
    dtypes = [x.dtype.name, *([jnp.dtype(params["dtype"]).name] if "dtype" in params else [])]
    if any(name not in names for name in dtypes):
        return f"dtypes must be among {', '.join(names)}, got {' and '.join(dict.fromkeys(dtypes))}"
    if not 1 <= x.shape[-1] < 2**30:
        return f"a row must have from 1 to {2**30 - 1} entries, got {x.shape[-1]}"
    rows = math.prod(operands["row"].shape if primitive == "categorical" else x.shape[:-1])
    if not 1 <= rows < 2**31:
        return f"there must be from 1 to {2**31 - 1} rows, got {rows}"
    where, needs_state = operands.get("where"), params["return_state"] or params.get("normalize") == "all"
    if primitive == "categorical":
        return "it takes no where" if where is not None else None
    if not 1 <= params["k"] <= MOST:
        return f"k must be from 1 to {MOST}, got {params['k']}"
    if where is not None and needs_state:  # which another kernel gives
        given = {"x": x, "where": where, "scale": operands.get("scale")}
        return _reason(_softmax_plan(LOGSUMEXP, target, given, axes=(x.ndim - 1,), dtype=jnp.float32), False)
    return None


def _unsupported_vjp(target, operands, *, size, dtype, **params) -> str | None:
    """Why no gradient of the largest weights can be computed, in words, or None."""
    names = dict.fromkeys([a.dtype.name for name in ("x", "c", "weights") if (a := operands[name]) is not None])
    names[jnp.dtype(dtype).name] = None
    if any(name not in DTYPES[:3] for name in names):
        return f"dtypes must be among {', '.join(DTYPES[:3])}, got {' and '.join(names)}"
    rows = math.prod(operands["indices"].shape[:-1])
    if not 1 <= rows < 2**31:
        return f"there must be from 1 to {2**31 - 1} rows, got {rows}"
    if _has_short_gradient(operands, size, dtype) or _is_of_selected(operands, params["normalize"]):
        return None
    given = {name: operands[name] for name in ("x", "where", "scale")}
    return _reason(_softmax_plan(LOGSUMEXP_VJP, target, given, axes=(operands["x"].ndim - 1,), dtype=dtype), False)


def _has_short_gradient(operands, size, dtype) -> bool:
    if any(operands[name] is not None for name in ("where", "scale")) or operands["c"] is None:
        return False
    x = None if operands["x"] is None else operands["x"].dtype.itemsize
    return short_gradient.serves(size, jnp.dtype(dtype).itemsize, operands["indices"].shape[-1], x)


def _is_of_selected(operands, normalize) -> bool:
    """Whether a gradient is that of selected weights alone, which needs nothing of whole rows."""
    return normalize == "selected" and operands["b"] is None


def lacks(primitive, operands, **params) -> bool:
    """Whether there is no kernel for such operands, so that the reference runs where this is forced."""
    if primitive == "softmax_top_k_vjp":
        is_short = _has_short_gradient(operands, params["size"], params["dtype"])
        return _is_of_selected(operands, params["normalize"]) and not is_short
    return primitive == "categorical" and operands.get("top_k") is not None


def unprofitable(primitive, target, operands, fused, cast, **params) -> str | None:
    """Why the reference should be faster although the kernels could run, in words, or None."""
    if primitive == "softmax_top_k_vjp":
        return _unprofitable_vjp(target, operands, fused, cast, **params)
    x = operands["x"]
    is_search = primitive == "top_k" and params["k"] == 1 and not params["return_state"]  # which XLA does without a sort
    if primitive == "categorical":
        is_search = all(operands.get(name) is None for name in ("top_k", "top_p", "min_p"))
        if math.prod(x.shape[:-1]) < math.prod(operands["row"].shape):
            return "the kernel would have a copy of the logits for each of their samples"
    if is_search and "x" in fused:
        return f"XLA computes {primitive} together with what produces its operand, which then is never in memory"
    if primitive == "top_k" and is_search and math.prod(x.shape) < 2**25:
        return "XLA's argmax is faster at so few elements"
    return None


def _unprofitable_vjp(target, operands, fused, cast, *, size, dtype, normalize, **params) -> str | None:
    del params
    x, k = operands["x"], operands["indices"].shape[-1]
    if _has_short_gradient(operands, size, dtype):
        return None
    if _is_of_selected(operands, normalize):
        rows = f"rows of up to {staged.MOST_COLS} columns that are whole vectors"
        return f"its kernel is for {rows}, k up to {staged.MOST}, no where and no scale, got {size} columns and k {k}"
    given = {name: operands[name] for name in ("x", "where", "scale")}
    return _reason(_softmax_plan(LOGSUMEXP_VJP, target, given, fused, axes=(x.ndim - 1,), dtype=dtype), True)


# How rows are spread over blocks.


def plan_for(target, rows: int, cols: int, itemsize: int, is_lifted: bool) -> Plan:
    """Sweeps of 2048 or 4096 elements, by fewer threads where rows are short, or a thread has a state for each of its places.

    With a state a thread has few places, and bits depend on the order of a row's elements: where rows start inside of a line,
    threads join vectors of two steps. Such rows are not copied to shared memory, which would then hold three blocks, not four.
    """
    vector, threads, unroll = 16 // itemsize, 256, itemsize
    if is_lifted:
        vector, threads, unroll = 4, 128, 16 // itemsize
    elif cols <= 8192:
        threads, unroll = 128, 4
    layout = RowPlan(cols, vector, threads, storage=Storage.NOWHERE, unroll=unroll, is_stored=not is_lifted)
    return plan_of(target, layout, rows, is_lifted, 0 if is_lifted else copied_of(layout, itemsize))


def top_k(x, where, scale, *, k, return_state, dtype, target):
    """The k largest values and their columns, and the state `(m, d)` if asked for: of masked rows from a kernel of its own."""
    *batch, cols = x.shape
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    rows, is_float = math.prod(batch), jnp.issubdtype(x.dtype, jnp.floating)
    if scale is None and where is None and (is_float or not return_state) and short_rows.serves(cols, x.dtype.itemsize, k):
        return _of_short_rows(x, k, dtype, None, return_state)
    is_lifted = return_state and where is None
    plan = plan_for(target, rows, cols, x.dtype.itemsize, is_lifted)
    layout, blocks = plan.layout, plan.blocks
    kind = jnp.dtype(jnp.float32) if is_float else x.dtype
    is_plain = scale is None and where is None
    of = x.dtype if is_plain else kind  # what is turned round, or masked, is so in `kind`
    sweep = layout.threads * layout.vector * layout.unroll
    limit = max(256, 2 * k)
    fill = -jnp.inf if is_float else jnp.iinfo(dtype).min
    given, source = {}, None
    if scale is not None:
        given["scale"] = jnp.broadcast_to(scale, (*batch, 1)).reshape(rows).astype(jnp.float32)
    if where is not None and where.shape[-1] == 1:
        given["where"] = jnp.broadcast_to(where, (*batch, 1)).reshape(rows).astype(jnp.float32)
    elif where is not None:
        given["where"] = where.reshape(-1, cols)
        source = None if where.shape == x.shape else RowProblem(x.shape, (x.ndim - 1,)).indexed(where.shape)

    def kernel(x_ref, *refs):
        operands, refs = dict(zip(given, refs, strict=False)), refs[len(given) :]
        (values, indices, *state_refs), refs = refs[: 2 + 2 * is_lifted], refs[2 + 2 * is_lifted :]
        entries, head, gathered, *scratch = refs
        row = Row(plan, scratch)
        memory = row.tile.memory
        held, found = memory.read(x_ref, fill, kind), Candidates(entries, head, k, limit, layout, kind, of)
        sign = operands["scale"][memory.row] if "scale" in operands else None
        seen = _mask(row.tile, operands["where"], source) if "where" in operands else None
        states = States(row, scratch[-1], None if sign is None else jnp.abs(sign)) if is_lifted else None
        if states is not None:
            states.clear()
        start(plan)
        found.clear()

        def directed(steps, loaded, in_loop):
            """What is ordered: `x` turned round where the scale is negative, without what is masked."""
            arrays = list(map(held.converted, loaded))
            if sign is not None:
                arrays = [choose(sign < 0, -a, a) for a in arrays]
            for is_there in filter(None, (seen, None if in_loop or sign is None else memory.inside())):
                arrays = [select(is_there(step), a, fill) for step, a in zip(steps, arrays, strict=True)]
            return arrays

        def visit(number, steps, load, in_loop, carry):
            pl.when(found.is_long(number) != 0)(found.cut)
            loaded = load()
            arrays = loaded if is_plain else directed(steps, loaded, in_loop)
            places = Places(functools.partial(_columns, memory), [memory.row, *map(jnp.int32, steps)], in_loop)
            if (in_loop or isinstance(number, int)) and found.parts_of(len(arrays)):
                pl.when(jnp.equal(number, 0))(lambda: found.bound_from(arrays))
            top = held.maximum(arrays) if is_plain and held.in_words else functools.reduce(jnp.maximum, arrays)
            found.offer(number, arrays, top, places)
            if states is None:
                return carry
            scores = list(map(held.converted, loaded)) if is_plain else arrays
            return states.push(carry, scores, top.astype(jnp.float32))

        # Loading ahead takes registers, without which four blocks of a multiprocessor fit.
        ahead = is_lifted or rows * blocks <= target.multiprocessors
        row.sweep(x_ref, held, visit, states, ahead)
        found.cut()
        last = found
        if blocks > 1:
            meet(plan)
            if states is not None:
                states.send()
            found.send(gathered, memory.rank)
            last = Candidates(gathered, head, k, limit, layout, kind, of)

        @pl.when(memory.rank == 0)
        def _():
            if blocks > 1:
                last.cut_to(blocks * k)
            last.store(memory.row, (values, indices), None if sign is None else jnp.where(sign < 0, -1.0, 1.0))
            if states is not None:
                for ref, value in zip(state_refs, states.merged(), strict=True):
                    memory.store_row(ref, value)

    results = [jax.ShapeDtypeStruct((rows * k,), dtype if is_float else kind), jax.ShapeDtypeStruct((rows * k,), jnp.int32)]
    results += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * (2 * is_lifted)
    scratch = [plgpu.SMEM((2 * (limit + sweep + 4),), jnp.int32), plgpu.SMEM((HEAD,), jnp.int32)]
    scratch += [plgpu.SMEM((2 * (blocks * k + 4),), jnp.int32)] if blocks > 1 else [None]
    call = launched("top_k_mosaic", kernel, plan, x.dtype, results, scratch, 2 * is_lifted)
    values, indices, *state = [a.reshape(*batch, -1) for a in call(x.reshape(rows, cols), *given.values())]
    if return_state and not is_lifted:
        options = {"axes": (x.ndim - 1,), "dtype": jnp.float32, "return_state": True, "target": target}
        state = _run_softmax(LOGSUMEXP, {"x": x, "where": where, "scale": scale}, **options)[1:]
    return [values.astype(dtype), indices, *state]


def _mask(tile, ref, source):
    """The mask as a function of a step: of each element, or one number for each row."""
    if ref.ndim > 1:
        return tile.memory.load_mask(ref, source)
    seen = tile.along(tile.memory.load_row(ref)) != 0
    return lambda step: seen


def softmax_top_k(x, where, scale, *, k, normalize, return_state, dtype, target):
    """The k largest weights and their columns, and the state `(m, d)` if asked for."""
    if scale is None and where is None and short_rows.serves(x.shape[-1], x.dtype.itemsize, k):
        return _of_short_rows(x, k, dtype, normalize, return_state)
    params = {"k": k, "return_state": return_state or normalize == "all", "dtype": x.dtype, "target": target}
    found = xla.weighed(top_k(x, where, scale, **params), where, scale, normalize, dtype)
    return found[: 2 + 2 * return_state]


def _of_short_rows(x, k, dtype, normalize, return_state):
    """What `short_rows.top_k` gives, of rows with their batch axes; integers are found in their own dtype."""
    *batch, cols = x.shape
    kind = dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    found = short_rows.top_k(x.reshape(-1, cols), k, kind, normalize, return_state)
    values, *others = [a.reshape(*batch, -1) for a in found]
    return [values.astype(dtype), *others]


def softmax_top_k_vjp(indices, c, b, x, m, d, weights, where, scale, *, size, normalize, dtype, scale_tangent, target):
    """The gradient for cotangents of weights and of the mean of rows. In long rows what was found is put in its place last."""
    if normalize == "selected" and b is None:
        x = m = d = None
    operands = {"indices": indices, "c": c, "b": b, "x": x, "m": m, "d": d, "weights": weights}
    if _has_short_gradient(operands | {"where": where, "scale": scale}, size, dtype):
        rows = [None if a is None else a.reshape(-1, a.shape[-1]) for a in operands.values()]
        return [short_gradient.gradient(*rows, cols=size, dtype=dtype).reshape(*indices.shape[:-1], size)]
    found, common = xla.parts_of_vjp(indices, c, b, x, m, d, weights, where, scale, normalize)
    params = {"axes": (x.ndim - 1,), "dtype": dtype, "scale_tangent": scale_tangent, "target": target}
    given = {"x": x, "m": m, "d": d, "t": common, "where": where, "scale": scale}
    (total,) = _run_softmax(LOGSUMEXP_VJP, given, **params)
    if found is None:
        return [total]
    found = found + xla.common_of_found(indices, common, x, m, d, where, scale)
    if scale_tangent and scale is not None:
        found = found * scale.astype(found.dtype)
    return [xla.scattered(lax.scatter, total, indices, found)]


def categorical(x, row, key0, key1, inverse, noise, top_k, top_p, min_p, where, *, return_state, target):
    """The indices of samples, and the state `(m, d)` of `inverse * x` if asked for."""
    del top_k, where
    batch, cols = row.shape[:-1], x.shape[-1]
    of_rows = {"row": row, "key0": key0, "key1": key1, "inverse": inverse, "noise": noise, "top_p": top_p, "min_p": min_p}
    of_rows = {name: a for name, a in of_rows.items() if a is not None}
    of_rows = {name: (a if a.size == 1 else jnp.broadcast_to(a, row.shape)).reshape(-1) for name, a in of_rows.items()}
    found = sampling.sample(target, jnp.broadcast_to(x, (*batch, cols)).reshape(-1, cols), of_rows, return_state)
    return [a.reshape(row.shape) for a in found]


def _softmax_plan(operation, target, operands, fused=frozenset(), **params):
    """Plans a problem of the softmax family."""
    types = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in operands.items() if a is not None}
    return of_softmax.plan(SoftmaxProblem(operation, types, params, fused=fused), target)


def _run_softmax(operation, operands, *, target, **params):
    plan = _softmax_plan(operation, target, operands, **params)
    plan = plan.plan if isinstance(plan, Refusal) else plan
    return plan.run(**operands)


def _reason(plan, is_slower):
    """Returns the reason of a refusal, if it is one of speed as `is_slower` says."""
    return plan.reason if isinstance(plan, Refusal) and (plan.plan is not None) == is_slower else None


def _columns(memory, row, *steps):
    """The column of a thread's first element in each of the steps, and how many of its elements are of the next step.

    They are MLIR values. A column is negative before the row.
    """
    layout, firsts = memory.plan, []
    for step in steps:
        (((first, _), *_),) = memory.places((row, 0), step)
        firsts.append(first)
    width = layout.threads * layout.vector
    return firsts, ptx.before_row(firsts[0], steps[0], width) if layout.is_joined else ptx.constant(0)
