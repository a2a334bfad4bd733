"""Takes the same training steps under each backend and puts the losses side by side.

``jaxllm.use_backend(name)`` asks for one implementation of every op, and it is an error if an op
has none. ``auto``, the default, takes the best that each op has on the machine instead. So two
models are trained: GPT-2, which runs under a backend once every one of its ops does, and a small
network whose only op is ``add_layer_norm``, which has every implementation. A backend that cannot
run a model is listed with the reason, in the library's own words.

On a CPU ``auto`` is ``xla``, ``pallas`` runs its kernels in an interpreter, and ``cuda`` has
nothing to run on.
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

BACKENDS = ("xla", "auto", "pallas", "cuda")  # the first is what the others are compared with


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        name: For the table.
        init: The parameters, from a key.
        loss: The loss of ``(params, inputs, targets)``.
        batch: Inputs and targets, from a key.
    """

    name: str
    init: Callable[[jax.Array], Any]
    loss: Callable[..., jax.Array]
    batch: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def gpt2_model(B: int = 2, T: int = 32) -> Model:
    """A GPT-2 that a CPU trains at once, on sequences that count upwards."""
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
    """Trains a fresh model under the backend that surrounds the call; the loss of each step."""
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
    """The table of a model: a column for each backend that ran, a line for each that did not."""
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
    """What ``auto`` gives each op call of the loss and its gradient."""
    key = jax.random.key(0)
    with jaxllm.use_backend("auto"):
        return str(jaxllm.explain(jax.grad(model.loss), model.init(key), *model.batch(key)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables.

    Args:
        argv: The arguments; None for the process's own.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--explain", action="store_true", help="list what auto gives each op call on a GPU, and why"
    )
    parser.add_argument("--smoke", action="store_true", help="two steps")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, must be above 0")
    steps = 2 if options.smoke else options.steps

    device = jax.devices()[0]
    print(f"On {device.device_kind}, computing in {options.dtype}.")
    if device.platform != "gpu":
        print("Without a GPU auto is xla, and pallas runs its kernels in an interpreter.")
    for model in (gpt2_model(), norm_model()):
        print(f"\n{compare(model, steps, options.seed, options.dtype)}")
        if options.explain:
            print(f"what auto gives each op call:\n{explain(model)}")


if __name__ == "__main__":
    main()
