"""Lists the private and experimental parts of JAX that the library uses, each with its reason, and wraps the private ones.

`EXPERIMENTAL` lists modules that JAX calls experimental, or has for those who extend it. The library uses them wherever it
needs them. `NAMES` lists private names, and other names that only kernels need. This module alone uses them, except those of
Pallas. `tests/core/test_compat.py` reads all imports, attributes and keywords of the library.

A JAX that lacks one of `NAMES` runs the reference, and `explain` names what it lacks. Importing the library, and the reference,
need none of them. A JAX that is newer than those that were tested runs the reference where a kernel does not lower, and
`explain` has the error. Nothing of Mosaic is imported before a kernel may run.
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

# Reason and names, by module. None stands for any name.
EXPERIMENTAL: dict[str, tuple[str, str | None]] = {
    "jax.core": ("types of operands", "ShapedArray Tracer"),
    "jax.custom_derivatives": ("tells which operands of a rule have a tangent", "SymbolicZero"),
    "jax.extend.core": (
        "primitives of our own, and programs of score and mask functions",
        "ClosedJaxpr Jaxpr Literal Primitive jaxpr_as_fun",
    ),
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

# Reason, by module and name. A parameter of a class stands in parentheses.
NAMES: dict[tuple[str, str], str] = {
    (_CONFIG, "_check_vma"): "collectives while lowering, on arrays whose types no longer name the axes they vary over",
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
    (_UTILS, "is_signed"): "tells whether integers of a dtype have a sign",
    (_UTILS, "memref_ptr"): "the address of an array, for PTX",
    (_UTILS, "thread_idx"): "the index of a thread in its block",
    (_UTILS, "warp_barrier"): "waits for the threads of a warp",
    (_UTILS, "warpgroup_barrier"): "waits for the threads of a warpgroup",
    (_UTILS, "when"): "a branch of MLIR without results",
}


@functools.cache
def find(module: str, name: str) -> Any:
    """Returns the object that `NAMES` lists as `name` of `module`. For a parameter it is the class that takes it.

    For a field of instances, which the class does not hold, it is None.

    Raises:
      ImportError: there is no such module, or no such name in it.
    """
    path, _, parameter = name.rstrip(")").partition("(")
    item: Any = importlib.import_module(module)
    for part in path.split("."):
        is_field = isinstance(item, type) and part in item.__annotations__
        if not is_field and not hasattr(item, part):
            raise ImportError(f"no {name}")
        item = getattr(item, part, None)
    if parameter and parameter not in inspect.signature(cast(Any, item)).parameters:
        raise ImportError(f"no {name}")
    return item


@functools.cache
def missing() -> str | None:
    """Says which one of `NAMES`, without which kernels cannot be built, this JAX lacks. None if it has all."""
    for module, name in NAMES:
        try:
            find(module, name)
        except ImportError:
            return f"jax {jax.__version__} has no {name} in {module}, which kernels need"
    return None


def cupti() -> Any:
    """Returns the module of jaxlib that asks CUPTI for the times of kernels, which the test harness of Mosaic GPU uses.

    Raises:
      ImportError: JAX's plugin for CUDA, which has it, is not installed.
    """
    plugin = importlib.import_module(f"{_MOSAIC}.profiler").mosaic_gpu_lib
    module = getattr(plugin, "_mosaic_gpu_ext", None)
    if module is None or not hasattr(module, "_cupti_init"):
        raise ImportError("CUPTI is missing: JAX's plugin for CUDA brings it")
    return module


# Sharding and lowering: this part also runs where kernels cannot.


def require_devices(primitive: Any) -> None:
    """Makes devices known while `primitive` is lowered, which `custom_partitioning` needs. JAX has no public way to ask for it.

    JAX then refuses to lower the primitive for an `AbstractMesh`. If JAX has no such table, nothing is done: `missing` makes
    all kernels refuse.
    """
    try:
        find(_DISPATCH, "prim_requires_devices_during_lowering").add(primitive)
    except ImportError:
        return


def of_module(ctx: Any, path: str) -> Any:
    """Returns the attribute `path`, such as "axis_context", of the module context of a lowering rule, or None."""
    return functools.reduce(lambda owner, name: getattr(owner, name, None), path.split("."), ctx.module_context)


def reaches_peers(ctx: Any) -> bool:
    """Tells whether a kernel may store to the memory of the other devices that a program runs on.

    Mosaic reaches the devices of one process, in the order of their numbers. If types say how arrays are sharded, a program is
    lowered for a mesh without devices: only the mesh that the user set names them.
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
    """Returns the values in XLA_FLAGS by flag, without its dashes. A flag without a value is "true"; the last of equals counts.

    JAX does not tell which flags XLA has. Options of a compilation, and a file that XLA_FLAGS names, are not known here.
    """
    pairs = (flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value.strip("'\"") if equals else "true" for name, equals, value in pairs}


def platforms(ctx: Any) -> Sequence[str]:
    """Returns the platforms that a lowering rule is for."""
    return ctx.platforms or of_module(ctx, "platforms")


def varying(array: Any) -> frozenset[Any]:
    """Returns the mesh axes over which an array varies, if a `shard_map` around it keeps count of them."""
    return jax.typeof(array).manual_axis_type.varying


def varying_as(aval: Any, like: Any) -> Any:
    """Returns a type that varies over mesh axes as the type `like` does, or over none if that is None."""
    like = jax.core.ShapedArray((), aval.dtype) if like is None else like
    return aval.update(manual_axis_type=like.manual_axis_type)


def unchecked() -> Any:
    """Returns a context in which collectives take arrays whose types do not name the mesh axes over which they vary."""
    try:
        return find(_CONFIG, "_check_vma")(False)
    except ImportError:
        return contextlib.nullcontext()


@contextlib.contextmanager
def without_directories() -> Iterator[None]:
    """Leaves directories out of the source locations in lowered text, so that it is the same wherever the library is installed.

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
    """Returns the context of a lowering rule, narrowed to one platform."""
    return ctx.replace(module_context=ctx.module_context.replace(platforms=(platform,)), platforms=(platform,))


def on_mesh_that_is_set(ctx: Any) -> Any:
    """Adds the mesh of `jax.set_mesh` to the context of a lowering rule. JAX leaves it out if no operand is on a mesh."""
    axes, mesh = of_module(ctx, "axis_context"), _mesh_that_is_set()
    is_unknown = mesh is not None and getattr(axes, "abstract_mesh", mesh) is None
    if not is_unknown or axes.device_assignment != tuple(mesh.devices.flat):
        return ctx
    axes = dataclasses.replace(axes, abstract_mesh=mesh.abstract_mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=axes))


# Kernels.


def __getattr__(name: str) -> Any:  # `utils`: names of Mosaic, which must not load with this module
    if name != "utils":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return SimpleNamespace(**{name: find(module, name) for module, name in NAMES if module == _UTILS})


def standardize_text() -> None:
    """Makes the text of the kernel that calls it depend on nothing but the kernel, so that it is the same in every process.

    A hash of the text is in the custom call, and a cache of compiled programs is looked up by it. JAX 0.11 puts the number of
    kernels that the process lowered before into the text, so that the cache misses what another process compiled.
    """
    _standard_text().bind()


@functools.cache
def _standard_text() -> Primitive:
    """Returns the primitive whose lowering rule names the kernel. It computes nothing."""
    primitive = Primitive("standard_text")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda: [])
    mlir.register_lowering(primitive, lambda ctx: [])  # for a kernel that is interpreted
    for semantics in importlib.import_module(_PALLAS).LoweringSemantics:
        find(_KERNELS, "register_lowering_rule")(primitive, semantics)(_standardize)
    return primitive


def _standardize(ctx: Any) -> list[Any]:
    """Names the module that is lowered before JAX numbers it."""
    attributes = ctx.launch_ctx.module.operation.attributes
    attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]
    return []


def fragmented_array(registers: Any, layout: Any, shape: Any, is_signed: bool | None) -> Any:
    """Returns an array of Mosaic GPU that consists of these registers of MLIR; `is_signed` is None for floats."""
    array = np.empty(len(registers), object)
    array[:] = registers
    array = array.reshape(layout.registers_shape(shape))
    return find(_MOSAIC, "FragmentedArray(_registers)")(_registers=array, _layout=layout, _is_signed=is_signed)


def tiled_layout(tiling: Any, warp_dims: Any, lane_dims: Any, vector_dim: int) -> Any:
    """Returns a tiled layout of Mosaic GPU in canonical form."""
    kind = find(_MOSAIC, "TiledLayout(_check_canonical)")
    return kind(tiling, warp_dims, lane_dims, vector_dim, _check_canonical=False).canonicalize()


def store(ref: Any, values: Any) -> None:
    """Stores in any layout. Since 0.12 JAX refuses layouts that split cache lines or conflict in banks, except by this call."""
    pallas: Any = importlib.import_module(_PALLAS)
    if hasattr(pallas, "store"):
        pallas.store(ref, values, optimized=False)
    else:
        ref[...] = values


# Lowering in less time.


@functools.cache
def infer_layouts_sooner() -> None:
    """Makes Mosaic infer the layouts of kernels in less time, in this whole process. The layouts stay the same.

    `tests/core/test_lowered.py` compares the kernels. Nothing is replaced on a JAX that was not tested.
    """
    if tuple(jax.__version_info__) not in TESTED:
        return
    _remember_layouts()
    if jax.__version_info__ == (0, 11, 2):
        _infer_as_jax_0_12()


def _remember_layouts() -> None:
    """Caches tiled shapes, canonical layouts and the check of transfers, which Mosaic computes anew for each operation.

    `categorical(top_p=)` lowers in 1.23 s instead of 1.46, attention in float32 in 0.68 instead of 0.93 (two cores, b5b53ed).
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
        setattr(owner, name, _remembered(getattr(owner, name), lambda *args, **kwargs: (args, *kwargs.items())))

    def transfer_key(self, transforms, registers):
        return tuple(self.shape), tuple(self.strides), self.bitwidth, self.optimized, transforms, registers

    transfer = constraints.IsTransferableSmemRegisters
    transfer._is_supported_smem_transfer = _remembered(transfer._is_supported_smem_transfer, transfer_key)


def _remembered(function: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a cache of up to 4096 results, by a key of its arguments. A key without a hash bypasses it."""
    results: dict[Any, Any] = {}

    @functools.wraps(function)
    def remembered(*args, **kwargs):
        key = key_of(*args, **kwargs)
        try:
            if key in results:
                return results[key]
        except TypeError:  # a list, for example
            return function(*args, **kwargs)
        if len(results) >= 4096:
            results.clear()
        result = results[key] = function(*args, **kwargs)
        return result

    return remembered


def _infer_as_jax_0_12() -> None:
    """Makes JAX 0.11.2 infer layouts as JAX 0.12 does, in as little as a third of the time.

    For each operation of a kernel JAX 0.11.2 copies, compares and searches the layouts of all others, and prints the kernel to
    sort by its text. The replacements are our own, and give the layouts that JAX 0.12 gives. No other JAX needs them, so that
    the names are not in `NAMES`.
    """
    constraints, inference, layouts = (
        cast(Any, importlib.import_module(f"{_MOSAIC}.{name}")) for name in ("constraints", "layout_inference", "layouts")
    )

    @functools.wraps(constraints.ConstraintSystem.__and__)
    def joined(self, other):
        if isinstance(other, constraints.Unsatisfiable):
            return other
        left, right = self.assignments, other.assignments
        if any(left[variable] != right[variable] for variable in left.keys() & right.keys()):
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
        ranks = {variable: rank for rank, variable in enumerate(groups)}
        bounded = [each.expr for each in system.constraints if isinstance(each, constraints.Divides | constraints.OneOf)]
        ordered = {variable: sorted(groups[variable], key=ranks.__getitem__) for variable in bounded if variable in groups}
        return {variable: [other for other in group if other != variable] for variable, group in ordered.items()}

    @functools.wraps(search := inference.find_assignments_for)
    def assignments(unknowns, system, **options):
        return search(dict.fromkeys(unknowns), system, **options)

    constraints.ConstraintSystem.__and__ = joined
    constraints.compute_transitively_equal_vars = equal_variables
    inference.find_assignments_for = assignments
    layouts._from_tiled_layout_attr = functools.lru_cache(layouts._from_tiled_layout_attr)


# A newer JAX.


def is_tested() -> bool:
    """Tells whether this JAX is no newer than the newest one that was tested."""
    return tuple(jax.__version_info__) <= TESTED[-1]


def failure(function: Callable[..., Any], *args: Any) -> str | None:
    """Says why `function(*args)` fails on a JAX that was not tested, or returns None if it does not fail."""
    try:
        function(*args)
    except Exception as error:
        newest = ".".join(map(str, TESTED[-1]))
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"it does not lower on jax {jax.__version__}, which is newer than the newest that was tested, {newest}: {words}"
    return None


def lower(kernel: Callable[..., Any], operands: dict[str, Any], platform: str) -> None:
    """Lowers `kernel` by itself for operands of these types by name; None is absent."""
    types = {n: None if aval is None else jax.ShapeDtypeStruct(aval.shape, aval.dtype) for n, aval in operands.items()}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        jax.jit(lambda types: kernel(**types)).trace(types).lower(lowering_platforms=(platform,))
