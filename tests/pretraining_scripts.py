"""The pretraining scripts, as the tests of several examples run them."""

import json

import pretrain_gpt2
import pretrain_llama3
import pytest

# The scripts, and their output folders.
SCRIPTS = pytest.mark.parametrize(
    ("script", "out"),
    [(pretrain_gpt2, "runs/gpt2_tiny"), (pretrain_llama3, "runs/llama3_tiny")],
    ids=["gpt2", "llama3"],
)


def read_log(path):
    """The records of a log, every line of which must be whole."""
    return [json.loads(line) for line in path.read_text().splitlines()]
