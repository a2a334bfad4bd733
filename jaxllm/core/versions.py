"""The versions of JAX that jaxllm supports, checked when jaxllm is imported.

``docs/versions.md`` says how to support a newer one.
"""

import warnings

import jax

OLDEST_JAX = (0, 10)
NEXT_JAX = (0, 13)  # the first that is not supported yet


def check(installed: tuple[int, ...]) -> None:
    """Rejects a JAX that is too old, and warns of one that is newer than all that were tested.

    Raises:
        ImportError: It is too old.
    """
    text = ".".join(map(str, installed))
    if installed < OLDEST_JAX:
        raise ImportError(f"jaxllm needs JAX {_text(OLDEST_JAX)} or newer, and this is JAX {text}")
    if installed >= NEXT_JAX:
        warnings.warn(
            f"jaxllm was tested with JAX before {_text(NEXT_JAX)}, and this is JAX {text}; "
            f'where it fails, install "jax<{_text(NEXT_JAX)}"',
            stacklevel=3,
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


check(jax.__version_info__)
