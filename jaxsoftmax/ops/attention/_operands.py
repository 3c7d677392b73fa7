"""What the operands and results of attention are."""

from jaxsoftmax._core.operands import Operand

# Heads may be sharded; lengths and head sizes are whole on every device.
_HEADS = (None, "heads", None)
QUERY, KEY, VALUE = (Operand(name, _HEADS) for name in ("query", "key", "value"))
BIAS = Operand("bias", ("heads", None, None))
SINKS = Operand("sinks", ("heads",))
OUT, LSE = Operand("out", _HEADS), Operand("lse", ("heads", None))

OPERANDS = (
    QUERY,
    KEY,
    VALUE,
    BIAS,
    Operand("mask", ("heads", None, None)),
    Operand("query_lengths"),
    Operand("key_lengths"),
    Operand("query_segments", (None,)),
    Operand("key_segments", (None,)),
    SINKS,
    Operand("seeds", ("heads", None)),
)
RESULTS = (OUT, LSE)

# The operands that have tangents and cotangents, those tangents, and the cotangents of the results.
MOVING = {operand.name: operand for operand in (QUERY, KEY, VALUE, BIAS, SINKS)}
TANGENTS = tuple(operand.called(f"d_{name}") for name, operand in MOVING.items())
COTANGENTS = (OUT.called("d_out"), LSE.called("d_lse"))

# How many axes come behind those of the batch.
RANKS = {operand.name: len(operand.axes) for operand in (*OPERANDS, *RESULTS, *TANGENTS, *COTANGENTS)}
