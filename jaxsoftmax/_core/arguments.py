"""Arguments of public functions, checked: an error names the function and the argument, what came, and what is allowed."""

import operator
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_KINDS = {"boolean": np.bool_, "floating": jnp.floating, "integers": jnp.integer}


def shown(value: Any) -> str:
    """`value` in an error message: an array by its type, anything else as it prints, cut where it is long."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced {jax.typeof(value).str_short()}"
    if shape := getattr(value, "shape", ()):
        return f"an array of shape {shape}"
    if isinstance(value, int) and abs(value) > 2**64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else reprlib.repr(value)


def array(function: str, name: str, value: Any, kind: str | None = None, hint: str = "") -> jax.Array:
    """`value` as an array of numbers or bools, of a dtype of this kind: `"boolean"`, `"floating"` or `"integers"`."""
    wanted = "a boolean array" if kind == "boolean" else "an array of numbers"
    if not isinstance(value, jax.Array):
        known = isinstance(value, np.ndarray | np.generic | bool | int | float | complex)
        if not known and not hasattr(value, "__jax_array__"):
            raise TypeError(f"{function}: {name} must be {wanted}, got {type(value).__name__}")
        try:
            value = jnp.asarray(value)
        except (OverflowError, ValueError):  # an integer that no dtype holds
            raise ValueError(f"{function}: {name} must fit an array of numbers, got {shown(value)}") from None
        except TypeError:  # strings, objects, dates, long doubles
            dtype = getattr(value, "dtype", None)
            raise TypeError(f"{function}: {name} must be {wanted}, got dtype {dtype}") from None
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == np.bool_):
        raise TypeError(f"{function}: {name} must be {wanted}, got dtype {value.dtype}")
    if kind is not None and not jnp.issubdtype(value.dtype, _KINDS[kind]):
        raise TypeError(f"{function}: {name} must be {kind}, got {value.dtype}{hint}")
    return value


def listed(function: str, name: str, value: Any) -> Any:
    """`value`, as an array if it is a list or a tuple."""
    if not isinstance(value, list | tuple):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # rows of several lengths, traced numbers
        raise TypeError(f"{function}: {name} must be an array, or a list of concrete numbers, got {shown(value)}") from None


def flags(function: str, **values: Any) -> list[bool]:
    """Concrete bools, of arrays without axes too, by the names of their arguments."""
    for name, value in values.items():
        is_array = not isinstance(value, jax.core.Tracer) and getattr(value, "dtype", None) == np.bool_
        if not isinstance(value, bool) and not (is_array and np.shape(value) == ()):
            raise TypeError(f"{function}: {name} must be True or False, got {shown(value)}")
    return [bool(value) for value in values.values()]


def integer(function: str, name: str, value: Any, kind: str = "a concrete integer") -> int:
    """An integer, and not a bool, that is known while tracing; `kind` is what the error says of it."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name} must be {kind}, got {shown(value)}") from None


def number(function: str, name: str, value: Any, instead: str = "") -> float:
    """A concrete real number, of an array without axes too."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{function}: {name} must be a concrete number, got a traced one{instead}")
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0 and jnp.issubdtype(value.dtype, np.number):
        value = np.asarray(value)[()]
    real = isinstance(value, int | float | np.integer)
    real = real or (isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating))
    if isinstance(value, bool) or not real:
        raise TypeError(f"{function}: {name} must be a real number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{function}: {name} must be finite in float64, got {shown(value)}") from None


def soft_cap(function: str, value: Any, kind: np.dtype) -> float:
    """A concrete `logits_soft_cap` for arithmetic of this dtype."""
    cap, limits = number(function, "logits_soft_cap", value), jnp.finfo(kind)
    if not float(limits.tiny) <= cap <= float(limits.max):
        raise ValueError(f"{function}: logits_soft_cap must be positive and finite in {limits.dtype}, got {cap}")
    return cap


def names(function: str, name: str, value: Any) -> tuple[str, ...]:
    """The names of an argument that takes None for none, a string, or a sequence of strings."""
    found = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(found, tuple | list) or not all(isinstance(one, str) for one in found):
        raise TypeError(f"{function}: {name} must be None, a string or a sequence of strings, got {shown(value)}")
    return tuple(found)


def axis_names(function: str, value: Any, name: str = "axis_name") -> tuple[str, ...]:
    """The argument `axis_name`: mesh axes of a `shard_map` around the call, none for None."""
    found = names(function, name, value)
    try:
        lax.axis_size(found)
        is_known = True
    except NameError:
        is_known = False
    if not is_known or len(set(found)) != len(found):
        what = "mesh axes, each once, of a shard_map around the call"
        raise ValueError(f"{function}: {name} must name {what}, got {shown(value)}")
    return found


def dtype(function: str, name: str, value: Any, allowed: str) -> np.dtype:
    """Returns the dtype that JAX makes of `value`. Arrays are refused, although NumPy would take theirs, and dtypes of keys."""
    try:
        if not isinstance(value, np.ndarray | np.generic | jax.Array):
            return jax.dtypes.canonicalize_dtype(value)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{function}: {name} must be {allowed}, got {shown(value)}")


def random_key(function: str, name: str, value: Any) -> jax.Array:
    """One key of `jax.random`, typed or raw, as a typed one."""
    typed = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not typed and getattr(value, "dtype", None) != np.uint32:
        what = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{function}: {name} must be a key of jax.random, got {what}")
    if len(value.shape) != (0 if typed else 1):
        raise ValueError(f"{function}: {name} must be one key, got shape {value.shape}")
    try:
        return value if typed else jax.random.wrap_key_data(value)
    except (TypeError, ValueError):
        raise ValueError(f"{function}: {name} must be a key of jax.random, got uint32 of shape {value.shape}") from None


def callback(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a function."""
    if not callable(value):
        raise TypeError(f"{function}: {name} must be a function, got {shown(value)}")


def check_traceable(function: str, name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an array, or something of which there is a `jax.ShapeDtypeStruct`."""
    try:
        jax.eval_shape(lambda _: None, value)
    except (TypeError, OverflowError):
        raise TypeError(f"{function}: {name} must be an array or a jax.ShapeDtypeStruct, got {shown(value)}") from None
