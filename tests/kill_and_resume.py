"""Trains once without interruption and once with many kills; test_checkpoint.py runs this.

    PYTHONPATH=.:examples python tests/kill_and_resume.py FOLDER KILLS STEPS

Every run is a child that is forked after all imports, so a restart takes a second or two. Half of
the kills come at a random time, the others while a checkpoint is being written. FOLDER/shards has
the data. Prints a JSON object: the losses of the uninterrupted run, the losses that each killed run
logged, and the number of kills that left an incomplete checkpoint.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import orbax.checkpoint  # noqa: F401  so that children need not import it
import pretrain_gpt2

from jaxllm import training
from jaxllm.training import runlog

CHECKPOINTS = ["--checkpoint-every", "2", "--keep", "2", "--keep-every", "20", "--resume"]


def fork(folder: Path, name: str, steps: int, *more: str) -> int:
    """Starts a run in the background."""
    if child := os.fork():
        return child
    log = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    arguments = ["--smoke", "--steps", str(steps), "--data", str(folder / "shards"), *more]
    arguments += ["--val-every", "0", "--no-tensorboard", "--out", str(folder / name)]
    try:
        pretrain_gpt2.main(arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def finish(folder: Path, name: str, steps: int, *more: str) -> None:
    """Runs to completion."""
    _, status = os.waitpid(fork(folder, name, steps, *more), 0)
    assert status == 0, (folder / f"{name}.txt").read_text()


def wait(seconds: float, until: Callable[[], bool]) -> bool:
    """Waits until a condition holds; returns whether it did within ``seconds``."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        if until():
            return True
        time.sleep(0.0005)
    return False


def losses(folder: Path, name: str) -> dict[int, float]:
    """The losses that a run has logged so far, by step."""
    log = folder / name / "log.jsonl"
    return {r["step"]: r["loss"] for r in runlog.read_log(log)} if log.exists() else {}


def main(folder: Path, kills: int, steps: int) -> None:
    """Prints the JSON object of the module's docstring."""
    training.keep_compiled(folder / "cache")
    warnings.filterwarnings("ignore", message=r"os\.fork\(\)")
    finish(folder, "whole", steps)
    checkpoints = folder / "broken" / "checkpoints"

    def half_written() -> bool:
        return any(checkpoints.glob("*tmp*"))

    chance, runs, halves, start_up = random.Random(0), [], 0, 0.0
    for kill in range(kills):
        began = time.perf_counter()
        child = fork(folder, "broken", steps, *CHECKPOINTS)
        if kill == 0:
            assert wait(60, lambda: bool(losses(folder, "broken"))), "the run does not start"
            start_up = time.perf_counter() - began
        if kill % 2:
            time.sleep(chance.uniform(0, start_up + 1))
        else:
            for _ in range(chance.randint(1, 3)):
                wait(10, lambda: not half_written())
                assert wait(60, half_written), "no checkpoint is started"
            time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the run ended before it was killed"
        halves += half_written()
        runs.append(losses(folder, "broken"))
    finish(folder, "broken", steps, *CHECKPOINTS)
    runs.append(losses(folder, "broken"))
    print(json.dumps({"whole": losses(folder, "whole"), "runs": runs, "half_written": halves}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
