"""A small linear layer and its loss, by `linear_cross_entropy` and with all logits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

ROWS, HIDDEN, CLASSES = (3, 70), 16, 33
WRT = ("hidden", "weight", "bias", "sample_weight", "temperature")


def given(rows=ROWS, hidden=HIDDEN, classes=CLASSES, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {
        "hidden": rng.standard_normal((*rows, hidden)),
        "weight": rng.standard_normal((hidden, classes)),
        "bias": rng.standard_normal(classes),
        "sample_weight": rng.random(rows),
    }
    arrays = {
        name: array.astype(jnp.dtype(dtype) if name != "sample_weight" else array.dtype) for name, array in arrays.items()
    }
    return arrays | {"labels": rng.integers(0, classes, rows)}


def whole(
    arrays,
    reduction="mean",
    class_axis=-1,
    ignore_index=None,
    temperature=None,
    return_lse=False,
    return_entropy=False,
    **options,
):
    """Computes the results with all logits."""
    weight = arrays["weight"] if class_axis else arrays["weight"].T
    logits = arrays["hidden"] @ weight
    logits += jnp.broadcast_to(arrays.get("bias", 0.0), logits.shape).astype(logits.dtype)
    temperature = arrays.get("temperature", temperature)
    scale = None if temperature is None else jnp.broadcast_to(1 / temperature, logits.shape[:-1])
    options |= {"ignore_index": ignore_index, "scale": scale}
    loss, lse = jaxsoftmax.cross_entropy(logits, arrays["labels"], return_lse=True, **options)
    factors = jnp.asarray(arrays.get("sample_weight", np.ones(loss.shape)), loss.dtype)
    if ignore_index is not None:
        factors = jnp.where(arrays["labels"] == ignore_index, 0, factors)
    total = jnp.sum(factors * loss)
    loss = {"none": factors * loss, "sum": total, "mean": total / jnp.sum(factors)}[reduction]
    cap = options.get("logits_soft_cap")
    scores = logits if cap is None else cap * jnp.tanh(logits / cap)
    others = [lse] * return_lse + [jaxsoftmax.entropy(scores, scale=scale)] * return_entropy
    return (loss, *(jnp.where(factors != 0, other, 0) for other in others)) if others else loss


def by_parts(arrays, **options):
    arrays = dict(arrays)
    operands = [arrays.pop(name) for name in ("hidden", "weight", "labels")]
    return jaxsoftmax.linear_cross_entropy(*operands, **arrays, **options)


def with_gradients(f, arrays, **options):
    """Returns losses, and gradients of a function of them that is not linear, in one program."""

    @jax.jit
    def run(labels, wrt):
        loss = f(wrt | {"labels": labels}, **options)
        return loss, jax.grad(lambda wrt: jnp.sum(jnp.sin(f(wrt | {"labels": labels}, **options))))(wrt)

    return run(arrays["labels"], {name: array for name, array in arrays.items() if name in WRT})


def sharded_over(mesh, of_hidden, of_weight, arrays):
    """Places the arrays on devices by the specs of two of them, and returns them with the specs of all."""
    of_rows = P(*of_hidden[: arrays["labels"].ndim])
    specs = {"hidden": of_hidden, "weight": of_weight, "bias": P(*of_weight[1:]), "sample_weight": of_rows, "labels": of_rows}
    return {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}, specs
