"""Programs which run once are compiled in half the time."""

import jax
import pytest


@pytest.fixture
def quick_compilation():
    """Leaves out the compiler's costly optimisations: for claims on values, not on programs, of very small models."""
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)
