"""The switch of the backend in asyncio's tasks, in threads, and by the environment."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm import ops
from jaxllm.core import backend

ROOT = Path(__file__).parent.parent
OVERLAP = "another asyncio task of this thread is inside use_backend"


@pytest.fixture(autouse=True)
def nothing_stays():
    default = backend.resolve()
    yield
    assert backend.resolve() == default
    assert not backend._open.blocks


def implementation():
    """The backend that a call of an op gets, by its program."""
    (call,) = jaxllm.explain(ops.gelu, jnp.ones(3)).calls
    return call.fallback


async def hold(name, entered, leave):
    with jaxllm.use_backend(name):
        entered.set()
        await leave.wait()


async def hold_in_turn(names, order):
    """Enters a block in a task of its own for each name; leaves them in another order."""
    leave = [asyncio.Event() for _ in names]
    tasks = []
    for name, event in zip(names, leave, strict=True):
        entered = asyncio.Event()
        tasks.append(asyncio.create_task(hold(name, entered, event)))
        await entered.wait()
    for i in order:
        leave[i].set()
        await tasks[i]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_tasks_that_overlap_leave_no_request_behind(order):
    asyncio.run(hold_in_turn(["pallas", "xla", "auto"], order))
    assert backend._requested.value is None


def test_generators_that_overlap_leave_no_request_behind():
    def inside(name):
        with jaxllm.use_backend(name):
            yield

    first, second = inside("pallas"), inside("xla")
    next(first)
    next(second)
    first.close()
    assert backend.resolve() == "xla"
    second.close()


def test_an_op_refuses_to_run_in_the_block_of_another_task():
    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(hold("pallas", entered, leave))
        await entered.wait()
        x = jnp.ones(3)
        for call in (
            ops.gelu,
            jax.jit(lambda x: ops.gelu(2 * x)),
            jax.grad(lambda x: ops.gelu(x).sum()),
        ):
            with pytest.raises(jaxllm.BackendError, match=OVERLAP):
                call(x)
        assert ops.gelu(x, backend="xla").shape == (3,)
        with jaxllm.use_backend("xla"):
            assert implementation() == "xla"
        leave.set()
        await other
        ops.gelu(x)

    asyncio.run(main())


def test_a_task_refuses_to_go_on_in_a_block_that_another_one_entered_since():
    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        with jaxllm.use_backend("pallas"):
            other = asyncio.create_task(hold("xla", entered, leave))
            await entered.wait()
            with pytest.raises(jaxllm.BackendError, match=r"use_backend\('xla'\)"):
                ops.gelu(jnp.ones(3))
            leave.set()
            await other
            assert implementation() == "pallas-interpreter"

    asyncio.run(main())


def test_a_compiled_function_runs_as_the_innermost_open_block_says():
    """What use_backend documents: no Python runs that could tell the task."""
    traced = []

    @jax.jit
    def fn(x):
        traced.append(backend._requested.value)
        return x + 1

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(hold("pallas", entered, leave))
        await entered.wait()
        fn(jnp.ones(3))
        leave.set()
        await other

    fn(jnp.ones(3))
    with jaxllm.use_backend("pallas"):
        fn(jnp.ones(3))
    asyncio.run(main())
    assert traced == [None, "pallas"]


def test_tasks_that_are_started_in_a_block_are_inside_it():
    async def child():
        await asyncio.sleep(0)
        return implementation()

    async def main():
        with jaxllm.use_backend("pallas"):
            return await asyncio.gather(child(), child())

    assert asyncio.run(main()) == ["pallas-interpreter"] * 2


def test_a_block_that_an_ended_task_left_open_holds():
    """As in a notebook, where each cell may be a task."""
    block = jaxllm.use_backend("pallas")

    async def enter():
        block.__enter__()

    async def use():
        return implementation()

    asyncio.run(enter())
    assert asyncio.run(use()) == "pallas-interpreter"
    block.__exit__(None, None, None)


def test_a_block_is_of_one_thread():
    found = []

    def run(fn):
        thread = threading.Thread(target=fn)
        thread.start()
        thread.join()

    def leave(block):
        with pytest.raises(jaxllm.BackendError, match="entered in another thread"):
            block.__exit__(None, None, None)
        found.append("refused")

    with jaxllm.use_backend("pallas"):
        run(lambda: found.append(backend.resolve()))
    block = jaxllm.use_backend("pallas")
    block.__enter__()
    run(lambda: leave(block))
    assert found == [backend._DEFAULT, "refused"]
    backend._leave(backend._open.blocks[-1])


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_variable_counts_as_unset(value):
    run = subprocess.run(
        [sys.executable, "-c", "from jaxllm.core import backend; print(backend.resolve())"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAXLLM_BACKEND": value, "PYTHONPATH": str(ROOT)},
    )
    assert (run.stdout, run.returncode) == ("auto\n", 0), run.stderr
