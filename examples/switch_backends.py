"""Takes the same training steps under each backend, and prints the losses side by side.

``jaxllm.use_backend(name)`` selects one implementation for every op, and raises an error if an op
does not have it. ``auto``, the default, selects the best implementation of each op for the device.

The script trains two models. GPT-2 runs under a backend if all of its ops do. A small network uses
only the op ``add_layer_norm``, which has every implementation. For a backend that cannot run a
model, the script prints the library's error.

On a CPU ``auto`` is ``xla``, ``pallas`` interprets its kernels, and ``cuda`` is not available.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxllm
from jaxllm import ops, training
from jaxllm.models import gpt2

BACKENDS = ("xla", "auto", "pallas", "cuda")  # the others are compared with the first


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        name: The name in the table.
        init: ``init(key) -> params``.
        loss: ``loss(params, inputs, targets) -> loss``.
        batch: ``batch(key) -> (inputs, targets)``.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[..., jax.Array]
    batch: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def gpt2_model(B: int = 2, T: int = 32) -> Model:
    """A tiny GPT-2, trained on sequences that count upwards."""
    config = gpt2.GPT2Config(vocab_size=64, max_seq_len=T, layers=2, heads=2, width=64)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jax.random.randint(key, (B, 1), 0, config.vocab_size)
        sequence = (first + jnp.arange(T + 1)) % config.vocab_size
        return sequence[:, :-1], sequence[:, 1:]

    return Model(
        "GPT-2",
        init=lambda key: gpt2.init(key, config),
        loss=lambda params, tokens, labels: gpt2.loss(params, tokens, labels, config),
        batch=batch,
    )


def norm_model(rows: int = 16, D: int = 64, L: int = 2) -> Model:
    """A pre-norm residual network that learns to reverse its input."""

    def init(key: jax.Array) -> Any:
        return {
            "blocks": {
                "weight": jax.random.normal(key, (L, D, D)) / D**0.5,
                "scale": jnp.ones((L, D)),
                "bias": jnp.zeros((L, D)),
            }
        }

    def loss(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        def block(carry, block):
            x, residual = carry
            out, h = ops.add_layer_norm(x, residual, block["scale"], block["bias"])
            return (jnp.tanh(out @ block["weight"]), h), None

        x = x.astype(params["blocks"]["weight"].dtype)
        (out, h), _ = jax.lax.scan(block, (x, jnp.zeros_like(x)), params["blocks"])
        return jnp.mean(jnp.square((out + h).astype(jnp.float32) - target))

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(key, (rows, D))
        return x, x[:, ::-1]

    return Model("add_layer_norm network", init, loss, batch)


def losses(model: Model, steps: int, seed: int, dtype: str) -> list[float]:
    """Trains a new model under the current backend; returns the loss of each step."""
    optimizer = training.adamw(1e-3)
    key = jax.random.key(seed)
    state = training.init_state(model.init(key), optimizer)
    step_fn = training.make_train_step(model.loss, optimizer, compute_dtype=dtype)
    found = []
    for step in range(steps):
        inputs, targets = model.batch(jax.random.fold_in(key, step))
        state, metrics = step_fn(state, inputs[None], targets[None])
        found.append(float(metrics["loss"]))
    return found


def compare(model: Model, steps: int, seed: int, dtype: str) -> str:
    """The table of a model: a column for each backend that runs, a line for each that cannot."""
    columns: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for backend in BACKENDS:
        try:
            with jaxllm.use_backend(backend):
                columns[backend] = losses(model, steps, seed, dtype)
        except jaxllm.BackendError as error:
            refused[backend] = str(error)
    expected = columns[BACKENDS[0]]
    lines = [f"{model.name}: loss by step", "step" + "".join(f"{name:>12}" for name in columns)]
    lines += [
        f"{step + 1:4}" + "".join(f"{column[step]:12.6f}" for column in columns.values())
        for step in range(steps)
    ]
    lines.append(f"largest difference from {BACKENDS[0]}:")
    lines += [
        f"    {name}: {max(abs(a - b) for a, b in zip(column, expected, strict=True)):.2e}"
        for name, column in list(columns.items())[1:]
    ]
    lines += [f"did not run: {name}\n    {reason}" for name, reason in refused.items()]
    return "\n".join(lines)


def explain(model: Model) -> str:
    """The implementation that ``auto`` selects for each op call of the loss and its gradient."""
    key = jax.random.key(0)
    with jaxllm.use_backend("auto"):
        return str(jaxllm.explain(jax.grad(model.loss), model.init(key), *model.batch(key)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables.

    Args:
        argv: The arguments; None for ``sys.argv``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--explain", action="store_true", help="list what auto selects for each op call, and why"
    )
    parser.add_argument("--smoke", action="store_true", help="two steps")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, must be above 0")
    if not -(2**63) <= options.seed < 2**63:
        parser.error(f"--seed is {options.seed}, must be from -2**63 to 2**63 - 1")
    steps = 2 if options.smoke else options.steps

    device = jax.devices()[0]
    print(f"On {device.device_kind}, computing in {options.dtype}.")
    if device.platform != "gpu":
        print("Without a GPU, auto is xla, and pallas interprets its kernels.")
    for model in (gpt2_model(), norm_model()):
        print(f"\n{compare(model, steps, options.seed, options.dtype)}")
        if options.explain:
            print(f"implementations that auto selects:\n{explain(model)}")


if __name__ == "__main__":
    main()
