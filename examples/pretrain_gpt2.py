"""Trains GPT-2 from scratch and samples from it.

Without arguments, the model's size depends on the device (tiny on a CPU). It trains on the source
code of Python's standard library, with bytes as tokens, and downloads nothing::

    python examples/pretrain_gpt2.py

The 124M model on llm.c's token shards, which have GPT-2's vocabulary::

    python examples/pretrain_gpt2.py --preset d12 --data fineweb10B --vocab-size 50257

Ctrl-C ends a run after the current step, and still saves the model and the loss curve.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pretraining
from pretraining import Recipe

from jaxllm.data.tokenizer import BYTES
from jaxllm.models import gpt2

TINY = gpt2.GPT2Config(vocab_size=BYTES.vocab_size, max_seq_len=128, layers=4, heads=4, width=128)
FAMILY = pretraining.Family(
    name="GPT-2",
    model=gpt2,
    presets={"tiny": TINY, **gpt2.PRESETS},
    overlap=False,
    recipes={
        "tiny": Recipe(steps=600, batch_size=16, seq_len=128, lr=4e-3, warmup=50),
        # llm.c's recipe for 10 billion tokens: 524,288 tokens per step.
        "d12": Recipe(steps=18_865, batch_size=16, accumulate=32, lr=6e-4, warmup=700),
        "d24": Recipe(steps=18_865, batch_size=8, accumulate=64, lr=3e-4, warmup=700),
        "d36": Recipe(steps=18_865, batch_size=4, accumulate=128, lr=2.5e-4, warmup=700),
        "d48": Recipe(steps=18_865, batch_size=2, accumulate=256, lr=2e-4, warmup=700),
    },
)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains a GPT-2; see :func:`pretraining.main`."""
    pretraining.main(argv, FAMILY, __doc__)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
