"""Tests on eight devices; tests/test_sharded.py runs them in processes that have so many."""

import jax
import pytest

from jaxllm.core import gathers

# Programs that run at once can deadlock: their collectives wait for threads of one another.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# A process has the devices that it starts with, and the other tests start with one.
collect_ignore_glob = ["test_*.py"] if jax.device_count() < 8 else []


@pytest.fixture(autouse=True)
def warn_again(monkeypatch):
    """Each test sees the warnings that a test before it has seen."""
    monkeypatch.setattr(gathers, "_warned", set())
