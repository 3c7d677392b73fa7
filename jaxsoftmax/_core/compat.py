"""What the library uses of JAX that is private or may change, with its reason.

`EXPERIMENTAL` are modules that JAX calls experimental, or has for those who extend it: they are used wherever they are needed.
What kernels need beside those, and what is private, is in `NAMES`: this module alone uses it, except names of Pallas.

A JAX that lacks one of `NAMES` runs the reference, and `explain` says which one it lacks; importing this library, and the
reference, need none. So does a JAX that is newer than those that were tested, where a kernel does not lower there. Nothing of
Mosaic is imported before a kernel may run.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

# The versions of JAX that all tests ran on, the newest last.
TESTED = ((0, 11, 2), (0, 12, 0, 1))

_CONFIG = "jax._src.config"
_DISPATCH = "jax._src.dispatch"
_RULES = "jax.interpreters.mlir"
_MOSAIC = "jax.experimental.mosaic.gpu"
_PALLAS = "jax.experimental.pallas.mosaic_gpu"
_KERNELS = "jax._src.pallas.mosaic_gpu.lowering"
_UTILS = "jax.experimental.mosaic.gpu.utils"

# By module, why it is used, and which of its names are; None stands for any.
EXPERIMENTAL: dict[str, tuple[str, str | None]] = {
    "jax.core": ("types of operands", "ShapedArray Tracer"),
    "jax.extend.core": ("primitives of our own", "Primitive"),
    "jax.interpreters.ad": (
        "derivatives of primitives",
        "Zero add_tangents deflinear2 is_undefined_primal primitive_jvps primitive_transposes",
    ),
    "jax.interpreters.batching": ("batches of primitives", "primitive_batchers"),
    "jax.interpreters.mlir": ("rules that lower primitives", "ir lower_fun register_lowering"),
    "jax.interpreters.xla": ("eager calls of primitives", "apply_primitive"),
    "jax.experimental.custom_partitioning": ("kernels on shards of automatic mesh axes", "custom_partitioning"),
    "jax.experimental.pallas": ("kernels", None),
    _PALLAS: ("kernels for Hopper", None),
    "jaxlib.mlir.ir": ("types and constants of what kernels write in MLIR", None),
    "jaxlib.gpu_triton": ("tells whether a jaxlib runs Triton's kernels", None),
    "jaxlib.mlir.dialects": ("operations of what kernels write in MLIR", None),
}

# By module and name, why it is used. A parameter of a class stands in parentheses.
NAMES: dict[tuple[str, str], str] = {
    (_CONFIG, "_check_vma"): "exchanges in a `shard_map`, while lowering, what has lost the type that says over what it varies",
    (_CONFIG, "hlo_source_file_canonicalization_regex"): "leaves directories out of the text of a kernel",
    (_DISPATCH, "prim_requires_devices_during_lowering"): "makes devices known to `custom_partitioning`",
    (_RULES, "ModuleContext.axis_context"): "tells how many devices a program runs on, and a `shard_map` around it",
    (_RULES, "ModuleContext.symbol_table"): "finds the jitted functions that produce an operand",
    (_RULES, "ModuleContext.platforms"): "tells jax-triton what it compiles for",
    (_RULES, "LoweringParameters.for_export"): "tells an export, whose program cannot ask back how arrays are sharded",
    (_MOSAIC, "FragmentedArray(_registers)"): "an array of registers that PTX loaded",
    (_MOSAIC, "TiledLayout(_check_canonical)"): "a layout that is about to be made canonical",
    (_PALLAS, "inline_mgpu"): "puts MLIR and PTX into a kernel, for what Pallas lacks",
    (_PALLAS, "remote_ref"): "an array of another device, for kernels that merge over devices",
    (_PALLAS, "Layout.TILED"): "registers as vectors that Pallas has no name for",
    (_KERNELS, "register_lowering_rule"): "makes the text of a kernel the same in every process",
    (_UTILS, "bitwidth"): "the size of a type of MLIR",
    (_UTILS, "bytewidth"): "the size of a type of MLIR",
    (_UTILS, "c"): "a constant of MLIR",
    (_UTILS, "dtype_to_ir_type"): "the type of MLIR of a dtype",
    (_UTILS, "inline_ptx"): "an instruction that has no operation in MLIR",
    (_UTILS, "is_signed"): "whether integers of a dtype have a sign",
    (_UTILS, "memref_ptr"): "the address of an array, for PTX",
    (_UTILS, "thread_idx"): "the index of a thread in its block",
    (_UTILS, "warp_barrier"): "waits for the threads of a warp",
    (_UTILS, "when"): "a branch of MLIR without results",
}


@functools.cache
def find(module: str, name: str) -> Any:
    """What `module` has under a name of `NAMES`; of a parameter its class, of a field of an object no more than that it is.

    Raises:
      ImportError: there is no such module, or no such name in it.
    """
    path, _, parameter = name.rstrip(")").partition("(")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        is_field = isinstance(found, type) and part in found.__annotations__  # which has no value in the class
        if not is_field and not hasattr(found, part):
            raise ImportError(f"no {name}")
        found = getattr(found, part, None)
    if parameter and parameter not in inspect.signature(cast(Any, found)).parameters:
        raise ImportError(f"no {name}")
    return found


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be built with this JAX: the first of `NAMES` that it lacks, in words, or None."""
    for module, name in NAMES:
        try:
            find(module, name)
        except ImportError:
            return f"jax {jax.__version__} has no {name} in {module}, which kernels need"
    return None


def cupti() -> Any:
    """Returns the module of jaxlib that asks CUPTI for the times of kernels, which the test harness of Mosaic GPU uses.

    Raises:
      ImportError: there is none, as without JAX's plugin for CUDA.
    """
    plugin = importlib.import_module(f"{_MOSAIC}.profiler").mosaic_gpu_lib
    module = getattr(plugin, "_mosaic_gpu_ext", None)
    if module is None or not hasattr(module, "_cupti_init"):
        raise ImportError("CUPTI is missing: JAX's plugin for CUDA brings it")
    return module


# Sharding and lowering: these also run where kernels cannot.


def require_devices(primitive: Any) -> None:
    """Makes devices known while `primitive` is lowered; nothing where JAX has no such table, and kernels are refused."""
    try:
        find(_DISPATCH, "prim_requires_devices_during_lowering").add(primitive)
    except ImportError:
        return


def of_module(ctx: Any, path: str) -> Any:
    """What a lowering rule's context says of the module that is lowered, as `NAMES` says under `path`, or None."""
    return functools.reduce(lambda owner, name: getattr(owner, name, None), path.split("."), ctx.module_context)


def reaches_peers(ctx: Any) -> bool:
    """Whether a kernel may store to the memory of the other devices that a program runs on.

    Mosaic knows those of one process, in the order of their numbers. Where types say how arrays are sharded, a program is
    lowered for a mesh without devices, and which those are only the mesh that the user set says.
    """
    axes = of_module(ctx, "axis_context")
    mesh: Any = getattr(axes, "mesh", None)
    devices = getattr(axes, "device_assignment", None)
    if devices is None and not isinstance(mesh, jax.sharding.Mesh):
        mesh = _mesh_that_is_set()
        if mesh is None:
            return False
    devices = devices or list(mesh.devices.flat)
    if of_module(ctx, "lowering_parameters.for_export") or jax.process_count() > 1:
        return False
    return len(devices) > 1 and [device.id for device in devices] == list(range(len(devices)))


def _mesh_that_is_set() -> jax.sharding.Mesh | None:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # JAX refuses inside of a trace
        return None


def xla_flags() -> dict[str, str]:
    """What XLA_FLAGS says, by flag, without its dashes: "true" of one without a value; of equal flags the last counts.

    JAX does not tell what XLA was told. Options of a compilation, and a file that XLA_FLAGS names, are not known here.
    """
    pairs = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value.strip("'\"") if equals else "true" for name, equals, value in pairs}


def platforms(ctx: Any) -> Sequence[str]:
    """The platforms that a lowering rule is for."""
    return ctx.platforms or of_module(ctx, "platforms")


def varying(array: Any) -> frozenset[Any]:
    """The axes over which an array varies, of a `shard_map` around that keeps count of it."""
    return jax.typeof(array).manual_axis_type.varying


def unchecked() -> Any:
    """A context in which collectives take arrays whose types do not say over which axes of a `shard_map` they vary."""
    try:
        return find(_CONFIG, "_check_vma")(False)
    except ImportError:
        return contextlib.nullcontext()


@contextlib.contextmanager
def without_directories() -> Iterator[None]:
    """A context in which what is lowered names source files alone: where the library is installed tells no kernel from another.

    A pattern that the user set stays.
    """
    try:
        pattern = find(_CONFIG, "hlo_source_file_canonicalization_regex")
    except ImportError:
        yield
        return
    with pattern(pattern.value or r".*[/\\]"):
        yield


def on_platform(ctx: Any, platform: str) -> Any:
    """A lowering rule's context for what is lowered for this platform alone."""
    return ctx.replace(module_context=ctx.module_context.replace(platforms=(platform,)), platforms=(platform,))


def on_mesh_that_is_set(ctx: Any) -> Any:
    """A lowering rule's context that knows the mesh of `jax.set_mesh`, which JAX does not tell if no operand is on a mesh."""
    axes, mesh = of_module(ctx, "axis_context"), _mesh_that_is_set()
    is_unknown = mesh is not None and getattr(axes, "abstract_mesh", mesh) is None
    if not is_unknown or axes.device_assignment != tuple(mesh.devices.flat):
        return ctx
    axes = dataclasses.replace(axes, abstract_mesh=mesh.abstract_mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))


# Kernels.


def __getattr__(name: str) -> Any:  # `utils`, of Mosaic, which must not load with this module
    if name != "utils":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return SimpleNamespace(**{name: find(module, name) for module, name in NAMES if module == _UTILS})


def standardize_text() -> None:
    """Makes the text of the kernel that calls it depend on nothing but the kernel.

    A hash of the text is in the custom call. JAX 0.11 puts the number of kernels that the process lowered before into the text,
    so a compilation cache misses what another process compiled.
    """
    _standard_text().bind()


@functools.cache
def _standard_text() -> Primitive:
    """The primitive that does nothing in a kernel, and whose lowering rule makes the kernel's text the same everywhere."""
    primitive = Primitive("standard_text")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda: [])
    mlir.register_lowering(primitive, lambda ctx: [])  # where the kernel is interpreted
    for semantics in importlib.import_module(_PALLAS).LoweringSemantics:
        find(_KERNELS, "register_lowering_rule")(primitive, semantics)(_standardize)
    return primitive


def _standardize(ctx: Any) -> list[Any]:
    """Names the module that is lowered before JAX numbers it."""
    attributes = ctx.launch_ctx.module.operation.attributes
    attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]
    return []


def fragmented_array(registers: Any, layout: Any, shape: Any, is_signed: bool | None) -> Any:
    """An array of Mosaic GPU that consists of these registers of MLIR; `is_signed` is None for floats."""
    array = np.empty(len(registers), object)
    array[:] = registers
    array = array.reshape(layout.registers_shape(shape))
    return find(_MOSAIC, "FragmentedArray(_registers)")(_registers=array, _layout=layout, _is_signed=is_signed)


def tiled_layout(tiling: Any, warp_dims: Any, lane_dims: Any, vector_dim: int) -> Any:
    """A tiled layout of Mosaic GPU in canonical form."""
    kind = find(_MOSAIC, "TiledLayout(_check_canonical)")
    return kind(tiling, warp_dims, lane_dims, vector_dim, _check_canonical=False).canonicalize()


def store(ref: Any, values: Any) -> None:
    """Stores in any layout: since 0.12 JAX refuses what splits cache lines or meets in banks, unless told by `store`."""
    pallas: Any = importlib.import_module(_PALLAS)
    if hasattr(pallas, "store"):
        pallas.store(ref, values, optimized=False)
    else:
        ref[...] = values


# Lowering in less time.


@functools.cache
def infer_layouts_sooner() -> None:
    """Makes Mosaic infer the layouts of kernels in less time: the same ones, in this whole process.

    Nothing is replaced on a JAX that was not tested.
    """
    if tuple(jax.__version_info__) not in TESTED:
        return
    _remember_layouts()
    if jax.__version_info__ == (0, 11, 2):
        _infer_as_jax_0_12()


def _remember_layouts() -> None:
    """Remembers tiled shapes, canonical layouts and which transfers are supported, which Mosaic computes for each operation.

    `categorical(top_p=)` lowers in 1.23 s in place of 1.46, attention in float32 in 0.68 in place of 0.93 (two cores, b5b53ed).
    """
    arrays: Any = importlib.import_module(f"{_MOSAIC}.fragmented_array")
    constraints: Any = importlib.import_module(f"{_MOSAIC}.constraints")
    layout: Any = importlib.import_module(_PALLAS).Layout
    parameterized = type(layout.WG_SPLAT(()))
    for owner, name in (
        (arrays.Tiling, "tile_shape"),
        (arrays.Tiling, "untile_shape"),
        (arrays.TiledLayout, "canonicalize"),
        (parameterized, "to_mgpu"),
    ):
        setattr(owner, name, _remembered(getattr(owner, name), lambda *given, **named: (given, *named.items())))

    def of_transfer(self, transforms, registers):
        return tuple(self.shape), tuple(self.strides), self.bitwidth, self.optimized, transforms, registers

    transfer = constraints.IsTransferableSmemRegisters
    transfer._is_supported_smem_transfer = _remembered(transfer._is_supported_smem_transfer, of_transfer)


def _remembered(function: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers results of a function by a key of its arguments, and calls it where that cannot be hashed."""
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def remembered(*given, **named):
        key = key_of(*given, **named)
        try:
            if key in known:
                return known[key]
        except TypeError:  # a list, say
            return function(*given, **named)
        if len(known) >= 4096:
            known.clear()
        result = known[key] = function(*given, **named)
        return result

    return remembered


def _infer_as_jax_0_12() -> None:
    """Makes JAX 0.11.2 infer layouts as JAX 0.12 does, in as little as a third of the time.

    For each operation of a kernel JAX 0.11.2 copies, compares and searches the layouts of all others, and prints the kernel to
    sort by its text. The replacements are written here, and give the layouts that JAX 0.12 gives.
    """
    constraints, inference, layouts = (
        cast(Any, importlib.import_module(f"{_MOSAIC}.{name}")) for name in ("constraints", "layout_inference", "layouts")
    )

    @functools.wraps(constraints.ConstraintSystem.__and__)
    def joined(self, other):
        if isinstance(other, constraints.Unsatisfiable):
            return other
        own, others = self.assignments, other.assignments
        if any(own[variable] != others[variable] for variable in own.keys() & others.keys()):
            return constraints.Unsatisfiable()
        return constraints.ConstraintSystem(self.assignments | other.assignments, [*self.constraints, *other.constraints])

    @functools.wraps(constraints.compute_transitively_equal_vars)
    def equal_variables(system):
        groups: dict[Any, list[Any]] = {}
        for constraint in system.constraints:
            match constraint:
                case constraints.Equals(lhs=constraints.Variable() as left, rhs=constraints.Variable() as right):
                    group, other = (groups.setdefault(variable, [variable]) for variable in (left, right))
                    if group is not other:
                        group += other
                        groups.update(dict.fromkeys(other, group))
        places = {variable: place for place, variable in enumerate(groups)}
        bounded = [each.expr for each in system.constraints if isinstance(each, constraints.Divides | constraints.OneOf)]
        found = {variable: sorted(groups[variable], key=places.__getitem__) for variable in bounded if variable in groups}
        return {variable: [other for other in group if other != variable] for variable, group in found.items()}

    @functools.wraps(search := inference.find_assignments_for)
    def assignments(unknowns, system, **options):
        return search(dict.fromkeys(unknowns), system, **options)

    constraints.ConstraintSystem.__and__ = joined
    constraints.compute_transitively_equal_vars = equal_variables
    inference.find_assignments_for = assignments
    layouts._from_tiled_layout_attr = functools.lru_cache(layouts._from_tiled_layout_attr)


# A newer JAX.


def is_tested() -> bool:
    """Whether this JAX is no newer than the newest one that was tested."""
    return tuple(jax.__version_info__) <= TESTED[-1]


def failure(function: Callable[..., Any], *args: Any) -> str | None:
    """Why `function(*args)` fails on a JAX that was not tested, or None; on those that were, a failure is a defect of ours."""
    try:
        function(*args)
    except Exception as error:
        newest = ".".join(map(str, TESTED[-1]))
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"it does not lower on jax {jax.__version__}, which is newer than the newest that was tested, {newest}: {words}"
    return None


def lower(kernel: Callable[..., Any], operands: dict[str, Any], platform: str) -> None:
    """Lowers `kernel` by itself for operands of these types by name, None where one is absent."""
    types = {n: None if aval is None else jax.ShapeDtypeStruct(aval.shape, aval.dtype) for n, aval in operands.items()}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jax.jit(lambda types: kernel(**types)).trace(types).lower(lowering_platforms=(platform,))
