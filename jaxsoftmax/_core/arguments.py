"""Checks the arguments of public functions. An error names the function, the argument, its value, and what is allowed."""

import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_KINDS = {"boolean": np.bool_, "floating": jnp.floating, "integers": jnp.integer}


def shown(value: Any) -> str:
    """Returns `value` as an error message prints it: an array by its type, anything else by `repr`, shortened if it is long."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced {jax.typeof(value).str_short()}"
    if shape := getattr(value, "shape", ()):
        return f"an array of shape {shape}"
    if isinstance(value, int) and abs(value) > 2**64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else reprlib.repr(value)


def array(function: str, name: str, value: Any, kind: str | None = None, hint: str = "") -> jax.Array:
    """Returns `value` as an array of numbers or bools; `kind` limits its dtype to "boolean", "floating" or "integers"."""
    expected = "a boolean array" if kind == "boolean" else "an array of numbers"
    if not isinstance(value, jax.Array):
        is_number = isinstance(value, np.ndarray | np.generic | bool | int | float | complex)
        if not is_number and not hasattr(value, "__jax_array__"):
            raise TypeError(f"{function}: {name} must be {expected}, got {type(value).__name__}")
        try:
            value = jnp.asarray(value)
        except (OverflowError, ValueError):  # an integer that no dtype holds
            raise ValueError(f"{function}: {name} must fit an array of numbers, got {shown(value)}") from None
        except TypeError:  # strings, objects, dates, long doubles
            dtype = getattr(value, "dtype", None)
            raise TypeError(f"{function}: {name} must be {expected}, got dtype {dtype}") from None
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == np.bool_):
        raise TypeError(f"{function}: {name} must be {expected}, got dtype {value.dtype}")
    if kind is not None and not jnp.issubdtype(value.dtype, _KINDS[kind]):
        raise TypeError(f"{function}: {name} must be {kind}, got {value.dtype}{hint}")
    return value


def listed(function: str, name: str, value: Any) -> Any:
    """Returns a list or a tuple as an array, and any other value as it is."""
    if not isinstance(value, list | tuple):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # rows of several lengths, traced numbers
        raise TypeError(f"{function}: {name} must be an array, or a list of concrete numbers, got {shown(value)}") from None


def flags(function: str, **values: Any) -> list[bool]:
    """Returns the values of arguments, by name, that must be concrete bools or arrays of one."""
    for name, value in values.items():
        is_array = not isinstance(value, jax.core.Tracer) and getattr(value, "dtype", None) == np.bool_
        if not isinstance(value, bool) and not (is_array and np.shape(value) == ()):
            raise TypeError(f"{function}: {name} must be True or False, got {shown(value)}")
    return [bool(value) for value in values.values()]


def integer(function: str, name: str, value: Any, kind: str = "a concrete integer") -> int:
    """Returns an integer that is known while tracing and is no bool. `kind` describes what is allowed in the error."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} must be {kind}, got {shown(value)}") from None


def number(function: str, name: str, value: Any, instead: str = "") -> float:
    """Returns a concrete real number, or the one of an array without axes, as a float."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{function}: {name} must be a concrete number, got a traced one{instead}")
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0 and jnp.issubdtype(value.dtype, np.number):
        value = np.asarray(value)[()]
    is_real = isinstance(value, int | float | np.integer)
    is_real = is_real or (isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating))
    if isinstance(value, bool) or not is_real:
        raise TypeError(f"{function}: {name} must be a real number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{function}: {name} must be finite in float64, got {shown(value)}") from None


def soft_cap(function: str, value: Any, kind: np.dtype) -> float:
    """Returns the argument `logits_soft_cap`, which must be concrete, positive and finite in the dtype `kind`."""
    cap, limits = number(function, "logits_soft_cap", value), jnp.finfo(kind)
    if not float(limits.tiny) <= cap <= float(limits.max):
        raise ValueError(f"{function}: logits_soft_cap must be positive and finite in {limits.dtype}, got {cap}")
    return cap


def names(function: str, name: str, value: Any) -> tuple[str, ...]:
    """Returns the names in an argument that is None, a string, or a sequence of strings."""
    listing = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(listing, tuple | list) or not all(isinstance(one, str) for one in listing):
        raise TypeError(f"{function}: {name} must be None, a string or a sequence of strings, got {shown(value)}")
    return tuple(listing)


def axis_names(function: str, value: Any, name: str = "axis_name") -> tuple[str, ...]:
    """Returns the argument `axis_name`: the mesh axes of a `shard_map` around the call, or () for None."""
    if value is None:
        return ()
    mesh_axes = names(function, name, value)
    try:
        lax.axis_size(mesh_axes)
        is_known = True
    except NameError:
        is_known = False
    if not is_known or len(set(mesh_axes)) != len(mesh_axes):
        what = "mesh axes, each once, of a shard_map around the call"
        raise ValueError(f"{function}: {name} must name {what}, got {shown(value)}")
    return mesh_axes


def dtype(function: str, name: str, value: Any, allowed: str) -> np.dtype:
    """Returns the dtype that JAX makes of `value`. Refuses arrays, whose dtype NumPy would return, and dtypes of keys."""
    try:
        if not isinstance(value, np.ndarray | np.generic | jax.Array):
            return jax.dtypes.canonicalize_dtype(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{function}: {name} must be {allowed}, got {shown(value)}")


def random_key(function: str, name: str, value: Any) -> jax.Array:
    """Returns one key of `jax.random` as a typed key; `value` may be a raw key, too."""
    is_typed = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not is_typed and getattr(value, "dtype", None) != np.uint32:
        what = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{function}: {name} must be a key of jax.random, got {what}")
    if len(value.shape) != (0 if is_typed else 1):
        raise ValueError(f"{function}: {name} must be one key, got shape {value.shape}")
    try:
        return value if is_typed else jax.random.wrap_key_data(value)
    except (TypeError, ValueError):
        raise ValueError(f"{function}: {name} must be a key of jax.random, got uint32 of shape {value.shape}") from None


def check_choice(function: str, name: str, value: Any, *allowed: str) -> None:
    """Raises ValueError unless `value` is one of the strings `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        *first, last = map(repr, allowed)
        raise ValueError(f"{function}: {name} must be {', '.join(first)} or {last}, got {shown(value)}")


def callback(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a function."""
    if not callable(value):
        raise TypeError(f"{function}: {name} must be a function, got {shown(value)}")


def check_traceable(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an array, or has a shape and a dtype as `jax.ShapeDtypeStruct` has."""
    try:
        jax.eval_shape(lambda _: None, value)
    except (TypeError, OverflowError):
        raise TypeError(f"{function}: {name} must be an array or a jax.ShapeDtypeStruct, got {shown(value)}") from None
