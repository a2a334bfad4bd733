"""The README's examples run."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm import testing
from jaxllm.models import gpt2

README = Path(__file__).parent.parent / "README.md"


def run_example(index):
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(examples[index], str(README), "exec"), names)
    return names


def test_first_example_runs(capsys):
    names = run_example(0)
    for name, like in (("dx", "x"), ("dscale", "scale"), ("dbias", "bias")):
        assert names[name].shape == names[like].shape
        assert np.isfinite(names[name].astype("float32")).all()
    for name in ("y_pallas", "y_xla"):
        difference = np.abs(names[name].astype("float32") - names["y"].astype("float32"))
        assert difference.max() < 0.05, name
    assert "layer_norm_backward" in capsys.readouterr().out


def test_multi_gpu_example_is_correct():
    names = run_example(1)
    config = names["config"]
    params = gpt2.init(jax.random.key(0), config)
    shape = (2 * jax.device_count(), config.max_seq_len)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    labels = jnp.roll(tokens, -1, axis=1)
    expected = jax.value_and_grad(gpt2.loss)(params, tokens, labels, config)
    batch = jax.device_put((tokens, labels), names["batch"])
    found = names["loss_and_gradients"](params, *batch)
    testing.assert_close(found, expected, "float32")
