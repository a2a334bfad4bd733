"""Trains a Llama 3 from scratch and samples from it.

Without arguments, the model's size depends on the device (tiny on a CPU). It trains on the source
code of Python's standard library, with bytes as tokens, and downloads nothing::

    python examples/pretrain_llama3.py

The shape of Llama 3.2 1B, on token shards with GPT-2's vocabulary::

    python examples/pretrain_llama3.py --preset 3.2-1b --data fineweb10B --vocab-size 50257

To save memory, ``--remat activations`` recomputes norms, RoPE and activations in the backward pass
at little cost, and ``--remat blocks`` recomputes the matmuls as well.
Ctrl-C ends a run after the current step, and still saves the model and the loss curve.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import pretraining
from pretraining import Recipe

from jaxllm.data.tokenizer import BYTES
from jaxllm.models import llama3

TINY = dataclasses.replace(
    llama3.PRESETS["d6"],
    vocab_size=BYTES.vocab_size,
    layers=4,
    heads=4,
    kv_heads=2,
    width=128,
    mlp_width=384,
    rope_theta=10_000.0,
)
FAMILY = pretraining.Family(
    name="Llama",
    model=llama3,
    presets={"tiny": TINY, **llama3.PRESETS},
    recipes={
        "tiny": Recipe(steps=600, batch_size=16, seq_len=128, lr=4e-3, warmup=50),
        # Like the GPT-2 of its size: 524,288 tokens per step.
        "d12": Recipe(steps=18_865, batch_size=16, accumulate=32, lr=6e-4, warmup=700),
        "3.2-1b": Recipe(
            steps=18_865, batch_size=4, seq_len=4096, accumulate=32, lr=3e-4, warmup=700
        ),
    },
)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains a Llama 3; see :func:`pretraining.main`."""
    pretraining.main(argv, FAMILY, __doc__)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
