"""The losses of a linear layer together with their gradients, for a factor of each row, as a primitive.

    linear_cross_entropy_gradient  from a factor of each row: the results of `LossHead` or `PolicyHead`, which are the losses,
                                   the log-sum-exp or the log-probabilities, and the entropy if the head asks for it; and
                                   then the derivatives of sum(factors * losses) by the operands that `wrt` names

It takes three products, as a loss with all logits in memory does: logits are computed once. A kernel may take four for a weight
that is not aligned. Examples of a batch may share the weight and the bias, and have gradients of their own.

If devices share the classes, labels count those of all devices. A collective merges the terms of rows between the products.
The results of the devices add up, and so do the gradients of arrays that all devices have.
"""

import functools
from typing import Any

import jax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import OnShards, Operand, Operation
from jaxsoftmax._core.primitive import define, jvp_as_reference, set_jvp
from jaxsoftmax._core.target import ONE_DEVICE
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.linear_parts import Wanted, gradients_of_parts

_HIDDEN = Operand("hidden", ("rows", None), may_be_one=False)
_OF_ROWS = Operand("labels", ("rows",), may_be_one=False)
_WEIGHT, _BIAS = Operand("weight", (None, None)), Operand("bias", (None,))
# Names of the operands of rows that a `PolicyHead` takes. They stand here, as the head imports this primitive.
OF_POLICY = ("advantages", "old_log_p", "reference_log_p", "kl_weight")
_OPERANDS = (_HIDDEN, _WEIGHT, _OF_ROWS, _BIAS, *map(_OF_ROWS.called, ("scale", *OF_POLICY, "factors")))


def _results(*, head, wrt, **params) -> list[Operand]:
    del params
    by_name = {operand.name: operand for operand in _OPERANDS}
    return [_OF_ROWS] * (2 + head.return_entropy) + [by_name[name] for name in wrt]


def _types(operands, *, head, wrt, **params):
    del params
    labels, kind = operands["labels"], accumulator(operands["hidden"].dtype)
    of_rows, axes = jax.ShapeDtypeStruct(labels.shape, kind), labels.ndim - 1
    gradients = [operands[name] for name in wrt]
    gradients = [jax.ShapeDtypeStruct((*labels.shape[:axes], *each.shape[axes:]), each.dtype) for each in gradients]
    return [of_rows] * (2 + head.return_entropy) + gradients


# See the comment on shards in `linear_terms.py`.
LINEAR_CROSS_ENTROPY_GRADIENT = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "linear_cross_entropy_gradient",
        _OPERANDS,
        types=_types,
        results=_results,
        on_shards=OnShards.NOTHING,
        joined=("classes",),  # which no operand names: who calls says over which mesh axes devices share them
        knows_machine=True,
    )
)
set_jvp(LINEAR_CROSS_ENTROPY_GRADIENT, functools.partial(jvp_as_reference, LINEAR_CROSS_ENTROPY_GRADIENT))


def reference(*, head, wrt, factors, machine=ONE_DEVICE, **operands: Any) -> list[jax.Array]:
    """Computes the results of `linear_cross_entropy_gradient` for a part of the rows at a time, from their logits."""
    present = {name: operand for name, operand in operands.items() if operand is not None}
    # On automatic axes of several devices a first part in front of the others would add up gradients over the devices twice.
    # A `machine` does not count such axes where a `shard_map` has those of the classes.
    options = {"is_first_apart": machine.devices == 1 and not head.axis_name}

    def of_one(operands, factors):
        layer = {name: operands[name] for name in ("hidden", "weight", "bias") if name in operands}
        rows = {name: operand for name, operand in operands.items() if name not in layer}
        wanted = Wanted((tuple([name for name in wrt if name in layer]),), tuple([name for name in wrt if name in rows]))
        results, (by_layer,), by_rows = gradients_of_parts(head, (layer,), rows, [factors], wanted, **options)
        gradients = by_layer | by_rows
        return [*results, *(gradients[name].astype(operands[name].dtype) for name in wrt)]

    def of_batch(operands, factors):
        if factors.ndim == 1:
            return of_one(operands, factors)
        axes = {name: None if name in ("weight", "bias") and each.shape[0] == 1 else 0 for name, each in operands.items()}
        operands = {name: each[0] if axes[name] is None else each for name, each in operands.items()}
        return jax.vmap(of_batch, (axes, 0))(operands, factors)

    return of_batch(present, factors)
