"""Settings of every test: strict promotion of dtypes and ranks, and eight CPU devices beside whatever else there is."""

import jax
import kernels
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def has_gpu() -> bool:
    """Whether JAX sees an NVIDIA GPU."""
    return jax.default_backend() == "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and JAX sees none"))


@pytest.fixture
def gpu():
    """Leaves a test out, with the reason, where there is no GPU that the kernels run on."""
    if reason := kernels.missing(9):
        pytest.skip(reason)


@pytest.fixture
def x64():
    """Double precision while a test runs."""
    with jax.enable_x64(True):
        yield
