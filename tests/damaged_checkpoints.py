"""Restores checkpoints of sharded arrays with other shardings and with flipped bits; prints JSON.

test_checkpoint.py runs this in a subprocess. Orbax leaves failed reads that nobody awaits; they
raise when they are garbage collected, in any later test.
"""

import collections
import json
import random
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxllm import training
from jaxllm.training import checkpoint, optim
from jaxllm.training.checksum import checksums

V, T = 64, 8
OPTIMIZER = optim.adamw(1e-2)
RECORD = {"seed": 3, "order": "shuffled"}
OUTCOMES = 3  # nothing changed, not readable, found by checksum


def fresh(mesh, spec):
    """A state with a sharded table and moments. The other arrays are uncommitted."""
    table = jax.random.normal(jax.random.key(0), (V, 2 * V), jnp.bfloat16)
    table = jax.device_put(table, NamedSharding(mesh, spec))
    params = {"table": table, "bias": jnp.linspace(0, 1, 2 * V)}
    return training.init_state(params, OPTIMIZER, detect_anomalies=True)


def loss_fn(params, tokens, labels):
    out = jax.nn.one_hot(tokens, V, dtype=params["table"].dtype) @ params["table"] + params["bias"]
    return jnp.mean((out - labels[..., None]) ** 2)


def main(root: Path, flips: int) -> dict:
    """The shardings of the restored tables, and the outcomes of the flipped bits."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tokens = np.random.default_rng(0).integers(0, V, (1, 4, T), np.int32)
    step = training.make_train_step(loss_fn, OPTIMIZER, compute_dtype="float32")
    state, _ = step(fresh(mesh, PartitionSpec("x")), tokens, tokens)
    sums = checksums(state)
    with checkpoint.open_folder(root / "whole") as folder:
        checkpoint.save(folder, 1, state, RECORD)
        state, _ = step(state, tokens, tokens)
        folder.wait_until_finished()
        specs = []
        for spec in (PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec()):
            restored = checkpoint.restore(folder, fresh(mesh, spec))
            assert checksums(restored) == sums
            specs.append(str(restored.params["table"].sharding.spec))
            again, metrics = step(restored, tokens, tokens)
            assert np.isfinite(metrics["loss"])
            if spec == PartitionSpec("x"):
                assert checksums(again) == checksums(state)
    return {"specs": specs, "flips": flip(root, fresh(mesh, PartitionSpec("x")), sums, flips)}


def flip(root: Path, like: training.TrainState, sums: dict[str, str], flips: int) -> dict[str, int]:
    """Flips one bit of a file at a time; counts the flips by outcome.

    Orbax gives some files random names. So each run flips other bits: ``flips`` of them, and more
    until each outcome has come, up to 100.
    """
    rng, found = random.Random(0), collections.Counter()
    files = sorted(path for path in (root / "whole").rglob("*") if path.is_file())
    while found.total() < flips or (len(found) < OUTCOMES and found.total() < 100):
        shutil.rmtree(root / "damaged", ignore_errors=True)
        shutil.copytree(root / "whole", root / "damaged")
        # Files are chosen uniformly, so small files get as many flips as large ones.
        path = root / "damaged" / rng.choice(files).relative_to(root / "whole")
        content = bytearray(path.read_bytes())
        bit = rng.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            with checkpoint.open_folder(root / "damaged") as folder:
                is_whole = checksums(checkpoint.restore(folder, like)) == sums
                is_whole &= checkpoint.read_record(folder) == RECORD
            found["nothing changed" if is_whole else f"missed: {path}, bit {bit}"] += 1
        except (FileNotFoundError, ValueError) as error:
            is_sum = "differ from their saved checksums" in str(
                error
            ) or "record is damaged" in str(error)
            found["found by checksum" if is_sum else "not readable"] += 1
    return dict(found)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
