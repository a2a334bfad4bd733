"""Compiled programs that tests find again: in a folder that runs share, or in memory.

This file replaces functions of JAX that are not public.
"""

import collections
import os
import shutil
import threading

import jax
from jax._src import compilation_cache
from jax._src.interpreters import mlir


def link(shared, own):
    """Gives a process what is in the shared folder."""
    shared.mkdir(parents=True, exist_ok=True)
    for path in shared.glob("*-cache"):
        (own / path.name).symlink_to(path.absolute())


def add(own, shared):
    """Copies what a process has compiled to the shared folder, each file at once."""
    for path in own.glob("*-cache"):
        if not path.is_symlink() and not (shared / path.name).exists():
            incomplete = shared / f"{path.name}.{os.getpid()}"
            shutil.copyfile(path, incomplete)
            incomplete.replace(shared / path.name)


def share_contexts():
    """Lowers up to 100 programs of a thread in one MLIR context; JAX 0.11 does so itself.

    JAX 0.10 creates one for each program, in 3 to 5 ms, and keeps its 1.4 MB with the program.
    """
    create, current = mlir.make_ir_context, threading.local()

    def make_ir_context():
        if not getattr(current, "uses", 0):
            current.context, current.uses = create(), 100
        current.uses -= 1
        return current.context

    mlir.make_ir_context = make_ir_context


def keep_in_memory(folder):
    """Keeps the 2000 programs last used in memory, rather than as files in the cache folder.

    Writing and reading the files took 4% of the CPU time.
    """
    read, write = (
        compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time
    )  # fmt: skip
    programs = collections.OrderedDict()

    def is_used():  # A test may set another folder.
        return jax.config.values["jax_compilation_cache_dir"] == folder

    def get_executable_and_time(key, options, backend, devices, *host_callbacks):
        if not is_used():
            return read(key, options, backend, devices, *host_callbacks)
        if key not in programs or any(host_callbacks):
            return None, None
        programs.move_to_end(key)
        return programs[key]

    def put_executable_and_time(key, name, executable, backend, seconds):
        if not is_used():
            write(key, name, executable, backend, seconds)
            return
        programs[key] = executable, seconds
        if len(programs) > 2000:
            programs.popitem(last=False)

    compilation_cache.get_executable_and_time = get_executable_and_time
    compilation_cache.put_executable_and_time = put_executable_and_time
