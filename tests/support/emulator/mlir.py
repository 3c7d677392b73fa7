"""Translates kernels from the MLIR module into which Mosaic has lowered them to programs."""

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from . import arithmetic, machine, program, ptx
from .program import Label, Program, listed


@dataclass(frozen=True)
class Ref:
    """An array in memory.

    Attributes:
      space: of PTX.
      address: the slot of the address of its first element, in 64 bits.
      strides: in elements.
    """

    space: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Kernel:
    """A program, and the parameters of its launch.

    Attributes:
      addresses: the slots of the addresses of its arrays, by their number. What is not used has none.
    """

    program: Program
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    threads: int
    shared: int
    addresses: dict[int, int]


def kernel_of(module: ir.Module) -> Kernel:
    """Returns the only kernel of a lowered module."""
    with module.context:
        (function,) = (op for op in module.body.operations if op.operation.name == "func.func" and len(op.regions[0].blocks))
        return _Translation(function.operation.attributes["sym_name"].value.removesuffix("_mosaic_gpu")).kernel(function)


class _Translation:
    """Translates operations. Values of MLIR are slots: one for a scalar, a tuple for a vector, a `Ref` for an array."""

    def __init__(self, name: str):
        self.program = Program(name)
        self.values: dict[Any, Any] = {}
        self.launched: Any = None
        self.addresses: dict[int, int] = {}

    def kernel(self, function: Any) -> Kernel:
        (block,) = function.regions[0].blocks
        self.values.update(zip(block.arguments, ((), ("argument", 0)), strict=True))
        self.region(function.regions[0])
        grid, threads, cluster, shared = self._launch_sizes
        assert threads[1] == threads[2] == 1
        return Kernel(self.program.finish(), grid, cluster, threads[0], shared, self.addresses)

    def _sizes(self, launch):
        view = launch.opview
        grid = tuple(self.number(getattr(view, f"gridSize{axis}")) for axis in "XYZ")
        threads = tuple(self.number(getattr(view, f"blockSize{axis}")) for axis in "XYZ")
        given = [getattr(view, f"clusterSize{axis}") for axis in "XYZ"]
        cluster = tuple(1 if size is None else self.number(size) for size in given)
        shared = view.dynamicSharedMemorySize
        return grid, threads, cluster, 0 if shared is None else self.number(shared)

    def number(self, value: Any) -> int:
        return int(self.program.constants[self.values[value]])

    def region(self, region: Any) -> list[Any]:
        """Translates a region of one block, and returns the values that it yields."""
        (block,) = region.blocks
        for op in block.operations:
            op = op.operation
            if op.name in ("scf.yield", "scf.condition"):
                return [self.values[value] for value in op.operands]
            self.operation(op)
        return []

    def operation(self, op: Any) -> None:
        if op.name in _PLAIN:
            function = _PLAIN[op.name]
            self.elementwise(op, function(op) if op.name in _OF_ATTRIBUTES else function)
            return
        method = getattr(self, "_" + op.name.replace(".", "_"), None)
        if method is None:
            raise NotImplementedError(f"the emulator does not know the operation {op.name}: {op}")
        found = method(op, *(self.values[value] for value in op.operands))
        results = list(op.results)
        if len(results) == 1:
            self.values[results[0]] = found
        elif results:
            self.values.update(zip(results, found, strict=True))

    def elementwise(self, op: Any, function: Callable[..., Any]) -> None:
        (result,) = op.results
        dtype, count = kind_of(result.type)
        operands = [self.values[value] for value in op.operands]
        if count is None:
            self.values[result] = self.program.pure(function, dtype, *operands)
        else:
            parts = zip(*([part] * count if isinstance(part, int) else part for part in operands), strict=True)
            self.values[result] = tuple(self.program.pure(function, dtype, *part) for part in parts)

    def integer(self, value: int, width: int = 64) -> int:
        return self.program.constant(value % 2**width, arithmetic.unsigned(width))

    # The function around the kernel: it loads the addresses of the arrays from its second argument.

    def _gpu_launch(self, op, *operands):
        self.launched = op
        self.region(op.regions[0])

    def _nothing(self, op, *operands):
        return None

    _func_return = _gpu_terminator = _func_func = _nvvm_fence_proxy = _nothing

    def _builtin_unrealized_conversion_cast(self, op, *operands):
        if len(operands) != 1:  # registers of an array
            return operands
        (value,) = operands
        if len(op.results) != 1:  # registers of an array, or of a constant one
            return (value,) * len(op.results) if isinstance(value, int) else value
        kind = str(op.results[0].type)
        if kind.startswith("memref") and isinstance(value, tuple):
            _, address, _, *sizes = value
            rank = len(sizes) // 2
            numbers = [int(self.program.constants[slot]) for slot in sizes]
            space = "shared" if "workgroup" in kind else "global"
            itemsize = _bytes(ir.MemRefType(op.results[0].type).element_type)
            return Ref(space, address, tuple(numbers[:rank]), tuple(numbers[rank:]), itemsize)
        if kind.startswith("!llvm.struct") and isinstance(value, Ref):
            sizes = map(self.integer, (*value.shape, *value.strides))
            return (value.address, value.address, self.integer(0), *sizes)
        return value

    def _llvm_mlir_undef(self, op):
        kind = str(op.results[0].type)
        if kind.startswith("!llvm.struct"):
            rank = 0 if "array" not in kind else int(kind.split("array<")[1].split(" ")[0])
            return (self.integer(0),) * (3 + 2 * rank)
        dtype, count = kind_of(op.results[0].type)
        undefined = self.program.constant(
            np.uint64(machine.GARBAGE * (2**32 + 1)).astype(f"u{max(1, dtype.itemsize)}").view(dtype), dtype
        )
        return undefined if count is None else (undefined,) * count

    def _llvm_insertvalue(self, op, struct, value):
        at = self._place(op)
        return (*struct[:at], value, *struct[at + 1 :])

    def _llvm_extractvalue(self, op, struct):
        return struct[self._place(op)]

    def _place(self, op):
        """Returns the index of a part of a struct, as if it were flat: two pointers, an offset, and two arrays."""
        at, *inner = [int(k) for k in ir.DenseI64ArrayAttr(op.attributes["position"])]
        if not inner:
            return at
        kind = str(op.operands[0].type)
        return at + inner[0] if at == 3 else 3 + int(kind.split("array<")[1].split(" ")[0]) + inner[0]

    def _llvm_getelementptr(self, op, base, *indices):
        if self.launched is None:
            return ("argument", *ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]))
        size = _bytes(ir.TypeAttr(op.attributes["elem_type"]).value)
        given, found = iter(indices), base
        for constant in ir.DenseI32ArrayAttr(op.attributes["rawConstantIndices"]):
            index = self.integer(constant) if constant != -(2**31) else self._widened(next(given))
            step = self.program.pure(np.multiply, np.uint64, index, self.integer(size))
            found = self.program.pure(np.add, np.uint64, found, step)
        return found

    def _widened(self, slot):
        if self.program.dtypes[slot] == np.uint64:
            return slot
        return self.program.pure(arithmetic.extended(64), np.uint64, slot)

    def _llvm_load(self, op, address):
        if self.launched is None:
            place = address[1] if isinstance(address, tuple) else 0
            self.addresses[place] = self.program.slot(np.uint64)
            return self.addresses[place]
        dtype, count = kind_of(op.results[0].type)
        space = "shared" if "<3>" in str(op.operands[0].type) else "global"
        return self.loaded(space, address, dtype, count)

    def loaded(self, space, address, dtype, count):
        n = 1 if count is None else count
        values = tuple(self.program.slot(dtype) for _ in range(n))
        self.program.do(_load(space, dtype, n), values, program.MACHINE, address)
        return values[0] if count is None else values

    def _llvm_store(self, op, value, address):
        space = "shared" if "<3>" in str(op.operands[1].type) else "global"
        self.stored(space, address, value)

    def stored(self, space, address, value):
        values = listed(value)
        self.program.do(_store(space, self.program.dtypes[values[0]].itemsize), (), program.MACHINE, address, *values)

    def _memref_load(self, op, ref, *indices):
        dtype, count = kind_of(op.results[0].type)
        return self.loaded(ref.space, self.element(ref, indices), dtype, count)

    def _memref_store(self, op, value, ref, *indices):
        self.stored(ref.space, self.element(ref, indices), value)

    def element(self, ref, indices):
        address = ref.address
        for index, stride in zip(indices, ref.strides, strict=True):
            step = self.program.pure(np.multiply, np.uint64, self._widened(index), self.integer(stride * ref.itemsize))
            address = self.program.pure(np.add, np.uint64, address, step)
        return address

    def _memref_view(self, op, ref, offset, *sizes):
        kind = ir.MemRefType(op.results[0].type)
        shape = tuple(kind.shape)
        strides = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        address = self.program.pure(np.add, np.uint64, ref.address, offset)
        return Ref(ref.space, address, shape, strides, _bytes(kind.element_type))

    def _memref_subview(self, op, ref, *dynamic):
        given = iter(dynamic)
        static = [list(ir.DenseI64ArrayAttr(op.attributes[f"static_{name}"])) for name in ("offsets", "sizes", "strides")]
        assert ir.ShapedType.get_dynamic_size() not in static[1] + static[2], op
        is_dynamic = [offset == ir.ShapedType.get_dynamic_stride_or_offset() for offset in static[0]]
        offsets = [next(given) if own else self.integer(offset) for own, offset in zip(is_dynamic, static[0], strict=True)]
        kind = ir.MemRefType(op.results[0].type)
        strides = [a * b for a, b in zip(ref.strides, static[2], strict=True)]
        kept, sizes = list(kind.shape), []
        shape, own = [], []
        for size, stride in zip(static[1], strides, strict=True):  # axes of size 1 may be dropped
            left = kept[len(shape) :]
            if left and left[0] == size and not (size == 1 and len(left) < len(static[1]) - len(sizes)):
                shape.append(size)
                own.append(stride)
            sizes.append(size)
        assert shape == kept, op
        return replace(ref, address=self.element(ref, offsets), shape=tuple(shape), strides=tuple(own))

    def _memref_expand_shape(self, op, ref, *dynamic):
        kind = ir.MemRefType(op.results[0].type)
        shape, strides = tuple(kind.shape), []
        for axes, stride in zip(_groups(op.attributes["reassociation"]), ref.strides, strict=True):
            for axis in axes:
                strides.append(stride * math.prod(shape[k] for k in axes if k > axis))
        return replace(ref, shape=shape, strides=tuple(strides))

    def _memref_transpose(self, op, ref):
        kind = ir.MemRefType(op.results[0].type)
        return replace(ref, shape=tuple(kind.shape), strides=tuple(kind.get_strides_and_offset()[0]))

    def _memref_cast(self, op, ref):
        return ref

    def _gpu_dynamic_shared_memory(self, op):
        return Ref("shared", self.integer(machine.START), (0,), (1,), 1)

    def _llvm_ptrtoint(self, op, value):
        width = kind_of(op.results[0].type)[0].itemsize
        return value if width == 8 else self.program.pure(arithmetic.converted(np.dtype(np.uint32)), np.uint32, value)

    def _llvm_inttoptr(self, op, value):
        return (
            value
            if self.program.dtypes[value] == np.uint64
            else self.program.pure(arithmetic.converted(np.dtype(np.uint64)), np.uint64, value)
        )

    # Numbers.

    def _arith_constant(self, op):
        attribute = op.attributes["value"]
        dtype, count = kind_of(op.results[0].type)
        if count is not None:
            elements = ir.DenseElementsAttr(attribute)
            if not elements.is_splat:
                assert dtype in (np.uint32, np.float32), op
                if dtype == np.float32:
                    return tuple(self.program.constant(value, dtype) for value in ir.DenseFPElementsAttr(attribute))
                values = np.array(ir.DenseIntElementsAttr(attribute)).astype(np.int32).view(dtype).ravel()
                return tuple(self.program.constant(int(value), dtype) for value in values)
            attribute = elements.get_splat_value()
        value = attribute.value
        if dtype.kind == "u":
            value = int(value) % 2 ** (8 * dtype.itemsize)
        slot = self.program.constant(value, dtype)
        return slot if count is None else (slot,) * count

    _llvm_mlir_constant = _arith_constant

    def _widened_place(self, slot):
        return self.program.pure(arithmetic.converted(np.dtype(np.uint64)), np.uint64, slot)

    def _gpu_thread_id(self, op):
        return self._widened_place(program.THREAD) if _dimension(op) == "x" else self.integer(0)

    def _gpu_block_dim(self, op):
        return self.integer(self._launch_sizes[1]["xyz".index(_dimension(op))])

    def _gpu_block_id(self, op):
        return self._widened_place((program.BLOCK_X, program.BLOCK_Y, program.BLOCK_Z)["xyz".index(_dimension(op))])

    def _gpu_cluster_block_id(self, op):
        return self._widened_place(program.RANK) if _dimension(op) == "x" else self.integer(0)

    @functools.cached_property
    def _launch_sizes(self):
        return self._sizes(self.launched)

    def _vector_broadcast(self, op, value):
        _, count = kind_of(op.results[0].type)
        return tuple(listed(value)) * (count // len(listed(value)))

    def _vector_from_elements(self, op, *values):
        return values

    def _vector_extract(self, op, value, *dynamic):
        at = self._position(op, "static_position", op.operands[0].type)
        _, count = kind_of(op.results[0].type)
        return value[at] if count is None else value[at : at + count]

    def _vector_insert(self, op, value, vector):
        at, values = self._position(op, "static_position", op.results[0].type), listed(value)
        return (*vector[:at], *values, *vector[at + len(values) :])

    def _position(self, op, name, kind):
        positions, shape = list(ir.DenseI64ArrayAttr(op.attributes[name])), ir.VectorType(kind).shape
        assert all(position >= 0 for position in positions), op
        return sum(position * math.prod(shape[k + 1 :]) for k, position in enumerate(positions))

    def _vector_shuffle(self, op, a, b):
        both = (*a, *b)
        return tuple(both[k] for k in ir.DenseI64ArrayAttr(op.attributes["mask"]))

    def _llvm_extractelement(self, op, vector, place):
        return vector[int(self.program.constants[place])]

    def _llvm_insertelement(self, op, vector, value, place):
        at = int(self.program.constants[place])
        return (*vector[:at], value, *vector[at + 1 :])

    def _bitcast(self, op, value):
        dtype, count = kind_of(op.results[0].type)
        parts = listed(value)
        own = self.program.dtypes[parts[0]].itemsize
        bits = [self.viewed(part, f"u{own}") for part in parts]
        if own > dtype.itemsize:
            each = [arithmetic.part_of(k, 8 * dtype.itemsize) for k in range(own // dtype.itemsize)]
            bits = [self.program.pure(function, f"u{dtype.itemsize}", part) for part in bits for function in each]
        elif own < dtype.itemsize:
            n = dtype.itemsize // own
            join = arithmetic.joined(8 * dtype.itemsize)
            bits = [self.program.pure(join, f"u{dtype.itemsize}", *bits[k : k + n]) for k in range(0, len(bits), n)]
        found = tuple(self.viewed(part, dtype) for part in bits)
        return found[0] if count is None else found

    _vector_bitcast = _arith_bitcast = _bitcast

    def viewed(self, slot, dtype):
        dtype = np.dtype(dtype)
        return slot if self.program.dtypes[slot] == dtype else self.program.pure(arithmetic.viewed(dtype), dtype, slot)

    # Jumps.

    def move(self, sources, targets):
        sources, targets = _flat(sources), _flat(targets)
        if targets:
            self.program.do(arithmetic.same_of_all, tuple(targets), *sources)

    def fresh(self, value):
        """Makes slots for a value like this one."""
        if isinstance(value, tuple):
            return tuple(map(self.fresh, value))
        assert isinstance(value, int), value
        return self.program.slot(self.program.dtypes[value])

    def of_types(self, results):
        found = []
        for result in results:
            dtype, count = kind_of(result.type)
            found.append(self.program.slot(dtype) if count is None else tuple(self.program.slot(dtype) for _ in range(count)))
        return found

    def inner(self, region):
        self.program.enter()
        found = self.region(region)
        self.program.leave()
        return found

    def _scf_if(self, op, condition):
        targets = self.of_types(op.results)
        yes, no, after = Label(), Label(), Label()
        self.program.branch(condition, yes, no)
        for label, region in zip((yes, no), op.regions, strict=True):
            self.program.place(label)
            if len(region.blocks):
                self.move(self.inner(region), targets)
            self.program.end("jump", after)
        self.program.place(after)
        return targets[0] if len(targets) == 1 else targets

    def _scf_index_switch(self, op, value):
        targets, after = self.of_types(op.results), Label()
        cases = list(ir.DenseI64ArrayAttr(op.attributes["cases"]))
        default, *regions = op.regions
        labels, other = {case: Label() for case in cases}, Label()
        self.program.end("switch", value, labels, other)
        for label, region in (*zip(labels.values(), regions, strict=True), (other, default)):
            self.program.place(label)
            self.move(self.inner(region), targets)
            self.program.end("jump", after)
        self.program.place(after)
        return targets[0] if len(targets) == 1 else targets

    def _scf_for(self, op, lower, upper, step, *start):
        (block,) = op.regions[0].blocks
        index, *own = block.arguments
        carried = [self.fresh(lower), *map(self.fresh, start)]
        self.values[index] = carried[0]
        self.values.update(zip(own, carried[1:], strict=True))
        self.move((lower, *start), carried)
        head, body, after = Label(), Label(), Label()
        self.program.place(head)
        goes_on = self.program.slot(bool)
        self.program.do(arithmetic.of_signed(np.less), goes_on, carried[0], upper)
        self.program.branch(goes_on, body, after)
        self.program.place(body)
        found = self.inner(op.regions[0])
        following = self.program.slot(self.program.dtypes[lower])
        self.program.do(np.add, following, carried[0], step)
        self.move((following, *found), carried)
        self.program.end("jump", head)
        self.program.place(after)
        return carried[1] if len(carried) == 2 else carried[1:]

    def _scf_while(self, op, *start):
        before, after_region = op.regions
        carried = list(map(self.fresh, start))
        self.values.update(zip(before.blocks[0].arguments, carried, strict=True))
        self.move(start, carried)
        head, body, after = Label(), Label(), Label()
        self.program.place(head)
        self.program.enter()
        condition, *found = self.region(before)
        targets = list(map(self.fresh, found))
        self.move(found, targets)
        self.program.leave()
        self.program.branch(condition, body, after)
        self.values.update(zip(after_region.blocks[0].arguments, targets, strict=True))
        self.program.place(body)
        self.move(self.inner(after_region), carried)
        self.program.end("jump", head)
        self.program.place(after)
        return targets[0] if len(targets) == 1 else targets

    # What threads tell each other.

    def _gpu_barrier(self, op, *operands):
        ptx.barrier(self.program, self.integer(0, 32), None)

    def _nvvm_bar_warp_sync(self, op, mask):
        assert self.number(op.operands[0]) == 2**32 - 1
        self.program.do(lambda machine: (), (), program.MACHINE)
        self.program.converge()

    def _nvvm_elect_sync(self, op, *mask):
        found = self.program.slot(bool)
        self.program.do(machine.Machine.elected, found, program.MACHINE)
        self.program.converge()
        return found

    def _nvvm_shfl_sync(self, op, mask, value, which, clamp):
        assert self.number(op.operands[0]) == 2**32 - 1
        kind = _word(op.attributes["kind"], ("idx", "bfly", "up", "down"))
        found, inside = self.program.slot(self.program.dtypes[value]), self.program.slot(bool)
        self.program.do(_shuffle(kind), (found, inside), program.MACHINE, value, which, clamp)
        self.program.converge()
        return found

    def _nvvm_vote_sync(self, op, mask, value):
        assert self.number(op.operands[0]) == 2**32 - 1
        kind = _word(op.attributes["kind"], ("any", "all"))
        found = self.program.slot(bool)
        self.program.do(lambda machine, value: machine.vote(kind, value), found, program.MACHINE, value)
        self.program.converge()
        return found

    def _nvvm_ldmatrix(self, op, address):
        count, is_transposed = ir.IntegerAttr(op.attributes["num"]).value, "col" in str(op.attributes["layout"])
        found = tuple(self.program.slot(np.uint32) for _ in range(count))
        load = functools.partial(_load_matrices, count=count, is_transposed=is_transposed)
        self.program.do(load, found, program.MACHINE, address)
        self.program.converge()
        return found if count > 1 else found[0]

    def _nvvm_stmatrix(self, op, address, *words):
        store = functools.partial(_store_matrices, is_transposed="col" in str(op.attributes["layout"]))
        self.program.do(store, (), program.MACHINE, address, *words)
        self.program.converge()

    def _llvm_inline_asm(self, op, *operands):
        text, constraints = op.attributes["asm_string"].value, op.attributes["constraints"].value
        (result,) = op.results
        kinds = _result_types(result.type)
        results = [self.program.slot(dtype) for dtype in kinds]
        ptx.translate(self.program, text, constraints, results, operands)
        return tuple(results) if str(result.type).startswith("!llvm.struct") else results[0] if results else None


def _load_matrices(of: machine.Machine, address: Any, *, count: int, is_transposed: bool) -> tuple[np.ndarray, ...]:
    """Loads matrices of 8 rows of 16 bytes, at the addresses of 8 lanes each: a lane gets two 16-bit elements of each."""
    words = []
    for places in _places_of_matrices(of, address, count, is_transposed):
        halves = [of.load("shared", place, 2, 1)[0].astype(np.uint32) for place in places]
        words.append(halves[0] | halves[1] << np.uint32(16))
    return tuple(words)


def _store_matrices(of: machine.Machine, address: Any, *words: Any, is_transposed: bool) -> tuple[()]:
    for word, places in zip(words, _places_of_matrices(of, address, len(words), is_transposed), strict=True):
        for k, place in enumerate(places):
            of.store("shared", place, 2, [(np.asarray(word) >> np.uint32(16 * k)).astype(np.uint16)])
    return ()


def _places_of_matrices(of: machine.Machine, address: Any, count: int, is_transposed: bool) -> Iterator[list[np.ndarray]]:
    """Yields, for each matrix, the addresses of both elements that a lane has of it."""
    lanes, address = np.arange(of.now.size), np.asarray(address)
    for matrix in range(count):
        first = lanes // machine.WARP * machine.WARP + 8 * matrix
        by_four = lanes % machine.WARP // 4
        ends = ((lanes % 4 * 2 + k, by_four) if is_transposed else (by_four, lanes % 4 * 2 + k) for k in range(2))
        yield [address[first + row] + (2 * column).astype(address.dtype) for row, column in ends]


@functools.cache
def _load(space: str, dtype: Any, count: int) -> Callable[..., Any]:
    def run(of, address):
        found = of.load(space, address, dtype.itemsize, count)
        return [part.view(dtype) for part in found] if dtype.kind != "b" else [part != 0 for part in found]

    return run


@functools.cache
def _store(space: str, size: int) -> Callable[..., Any]:
    def run(of, address, *values):
        of.store(
            space, address, size, [np.asarray(value).view(np.uint8) if value.dtype.kind == "b" else value for value in values]
        )
        return ()

    return run


@functools.cache
def _shuffle(kind: str) -> Callable[..., Any]:
    return lambda of, value, which, clamp: of.shuffle(kind, value, which, clamp)


def _dimension(op: Any) -> str:
    return _word(op.attributes["dimension"], "xyz")


def _word(attribute: Any, known: Sequence[str]) -> str:
    """Returns the only one of some words that is in the text of an attribute."""
    (found,) = set(re.findall(r"\w+", str(attribute))) & set(known)
    return found


def _flat(values: Any) -> list[int]:
    return [values] if isinstance(values, int) else [slot for value in values for slot in _flat(value)]


def _groups(attribute: Any) -> list[list[int]]:
    return [[ir.IntegerAttr(axis).value for axis in ir.ArrayAttr(group)] for group in attribute]


def _result_types(kind: Any) -> list[Any]:
    text = str(kind)
    if text == "!llvm.void":
        return []
    if not text.startswith("!llvm.struct"):
        return [kind_of(kind)[0]]
    return [_NAMED[name.strip()] for name in text.removeprefix("!llvm.struct<(").removesuffix(")>").split(",")]


_NAMED = {
    "i1": np.dtype(bool),
    "i8": np.dtype(np.uint8),
    "i16": np.dtype(np.uint16),
    "i32": np.dtype(np.uint32),
    "i64": np.dtype(np.uint64),
    "index": np.dtype(np.uint64),
    "f16": np.dtype(np.float16),
    "bf16": arithmetic.BFLOAT16,
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


@functools.cache
def _kind_of_text(text: str) -> Any:
    if text in _NAMED:
        return _NAMED[text]
    if text.startswith("!llvm.ptr"):
        return np.dtype(np.uint64)
    raise NotImplementedError(f"the emulator does not know the type {text}")


def kind_of(kind: Any) -> tuple[Any, int | None]:
    """Returns the dtype of a scalar or a vector, and the number of elements of a vector."""
    if isinstance(kind, ir.VectorType):
        return _kind_of_text(str(kind.element_type)), math.prod(kind.shape)
    return _kind_of_text(str(kind)), None


def _bytes(kind: Any) -> int:
    dtype, count = kind_of(kind)
    return dtype.itemsize * (1 if count is None else count)


def _compare_integers(op: Any) -> Callable[..., Any]:
    number = ir.IntegerAttr(op.attributes["predicate"]).value
    name = ("eq", "ne", "lt", "le", "gt", "ge", "lt", "le", "gt", "ge")[number]
    function = arithmetic.COMPARISONS[name]
    return arithmetic.of_signed(function) if 2 <= number < 6 else function


def _compare_floats(op: Any) -> Callable[..., Any]:
    number = ir.IntegerAttr(op.attributes["predicate"]).value
    ordered = [np.equal, np.greater, np.greater_equal, np.less, np.less_equal]
    table = dict(enumerate(ordered, 1)) | {6: arithmetic.not_equal_ordered, 7: arithmetic.is_ordered}
    table |= {k: arithmetic.or_unordered(function) for k, function in enumerate(ordered, 8)}
    return (table | {13: np.not_equal, 14: arithmetic.is_unordered})[number]


def _width(op: Any) -> int:
    return 8 * kind_of(op.results[0].type)[0].itemsize


def _dtype(op: Any) -> Any:
    return kind_of(op.results[0].type)[0]


def _truncated(op: Any) -> Callable[..., Any]:
    return _lowest_bit if _dtype(op).kind == "b" else arithmetic.converted(_dtype(op))


def _lowest_bit(values: Any) -> Any:
    return (values & values.dtype.type(1)) != 0


# Operations that depend on attributes or types, too.
_OF_ATTRIBUTES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "arith.cmpi": _compare_integers,
    "arith.cmpf": _compare_floats,
    "arith.extui": lambda op: arithmetic.converted(_dtype(op)),
    "arith.index_castui": lambda op: arithmetic.converted(_dtype(op)),
    "arith.trunci": _truncated,
    "arith.index_cast": lambda op: arithmetic.extended(_width(op)),
    "arith.extf": lambda op: arithmetic.converted(_dtype(op)),
    "arith.truncf": lambda op: arithmetic.converted(_dtype(op)),
    "arith.uitofp": lambda op: arithmetic.converted(_dtype(op)),
    "arith.sitofp": lambda op: arithmetic.from_signed(_dtype(op)),
    "arith.extsi": lambda op: arithmetic.extended(_width(op)),
    "arith.fptosi": lambda op: arithmetic.to_signed(_dtype(op)),
    "arith.fptoui": lambda op: arithmetic.converted(_dtype(op)),
}

_PLAIN: dict[str, Callable[..., Any]] = _OF_ATTRIBUTES | {
    "arith.addi": np.add,
    "arith.subi": np.subtract,
    "arith.muli": np.multiply,
    "llvm.add": np.add,
    "llvm.mul": np.multiply,
    "arith.divui": np.floor_divide,
    "arith.ceildivui": arithmetic.divide_up,
    "arith.remui": np.remainder,
    "arith.divsi": arithmetic.divide_signed,
    "arith.remsi": arithmetic.remainder_signed,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": arithmetic.shift_left,
    "arith.shrui": arithmetic.shift_right,
    "arith.shrsi": arithmetic.shift_right_signed,
    "arith.maxsi": arithmetic.of_signed(np.maximum),
    "arith.minsi": arithmetic.of_signed(np.minimum),
    "arith.maxui": np.maximum,
    "arith.minui": np.minimum,
    "arith.select": arithmetic.select,
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.negf": np.negative,
    "arith.maximumf": arithmetic.maximum,
    "arith.minimumf": arithmetic.minimum,
    "math.absf": np.abs,
    "math.absi": arithmetic.of_signed(np.abs),
    "math.floor": np.floor,
    "math.ceil": np.ceil,
    "math.roundeven": np.rint,
    "math.sqrt": np.sqrt,
    "math.copysign": np.copysign,
    "math.exp": np.exp,
    "math.exp2": np.exp2,
    "math.log": np.log,
    "math.log2": np.log2,
    "math.fma": arithmetic.fma,
}
