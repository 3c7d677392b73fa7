"""Attention whose sequence is sharded over devices (context parallelism).

A file for each strategy, each with what it sends, and in it a function for attention, one for its tangents and one for its
cotangents:

    ring         keys travel around the devices, and each device attends to those that it holds
    gather       each device receives all keys, and attends to them once
    all_to_all   each device receives the whole sequence for some of the heads (Ulysses); also serves whole sequences
    merge        queries are whole: each device attends to its own keys, and the states of all devices merge

The other files: `settings` has the public `ContextParallel`, `order` the zigzag order, `cut` says how a sequence is cut over
devices, `visible` finds which keys a query sees and so the steps of a ring, `choose` picks the strategy by a model of its time,
`shard` is the record that the strategies take, and `attend` runs an operation for a part of the queries and of the keys.

A cut sequence has a shard on each device. A shard has pieces of neighbouring positions: one, or two in zigzag order. Kernels
know nothing of devices: `query_offset`, lengths and seeds tell them where their operands are in the sequence. With the
log-sum-exp and the output of whole rows, derivatives of parts of the keys add up.
"""
