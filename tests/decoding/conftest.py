"""Searches compile often and run briefly: their programs are compiled in half the time without most optimisations."""

import jax
import pytest


@pytest.fixture(autouse=True, scope='module')
def quick_compilation():
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)
