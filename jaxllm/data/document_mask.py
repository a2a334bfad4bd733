"""Documents in rows of tokens: segment ids and positions, from the token between documents.

A row of a batch is a window of the data set, which holds the end of one document, some whole ones
and the beginning of another. With an attention mask by document, a token attends only to tokens of
its own document, and positions count from its first token in the row::

    tokens        7  5  E  8  E  E  4  6      E: end of text
    segment_ids   0  0  0  1  1  2  3  3
    positions     0  1  2  0  1  0  0  1
    labels        5  E  8  E  E  4  6  9      next tokens; 8, E and 4 begin another document
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, Integer

from jaxllm.data.checks import as_integer

IGNORED = -1  # training and evaluation count labels that are not negative


def find_documents(
    tokens: Integer[np.ndarray, "*B T"], end_of_text: int
) -> tuple[Int32[np.ndarray, "*B T"], Int32[np.ndarray, "*B T"]]:
    """The document of each token in its row, and the position of each token in its document.

    A document ends with its end-of-text token. The next token begins another, so two such tokens in
    a row enclose no document but the second token itself. A document that began in another row
    begins at position 0 here: rows do not attend to each other.

    Args:
        tokens: Rows of tokens.
        end_of_text: The id of the token between documents, at least 0.

    Returns:
        ``(segment_ids, positions)``, int32 in the shape of ``tokens``, both from 0 in each row: the
        arguments of :func:`jaxllm.models.gpt2.loss`.

    Raises:
        TypeError: ``tokens`` is not an array of an integer dtype, or ``end_of_text`` not an
            integer.
        ValueError: ``tokens`` is a scalar, or ``end_of_text`` is negative.
    """
    _check_tokens(tokens=tokens)
    begins = np.zeros(tokens.shape, bool)
    begins[..., 1:] = _is_end(tokens, end_of_text)[..., :-1]
    index = np.arange(tokens.shape[-1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=-1)
    return np.cumsum(begins, axis=-1, dtype=np.int32), index - first


def ignore_next_document(
    tokens: Integer[np.ndarray, "*B T"],
    labels: Integer[np.ndarray, "*B T"],
    end_of_text: int,
    *,
    ignore_index: int = IGNORED,
) -> Integer[np.ndarray, "*B T"]:
    """The labels without those that begin another document than that of their token.

    The label of an end-of-text token is the first token of the next document, which does not depend
    on the document before it.

    Args:
        tokens: Rows of tokens.
        labels: The token that follows each token.
        end_of_text: The id of the token between documents, at least 0.
        ignore_index: The label that takes their place. A training step counts the labels that are
            not negative, so it should be negative.

    Returns:
        A copy of ``labels``; int32 for labels of an unsigned dtype, which has no negative ids.

    Raises:
        TypeError: ``tokens`` or ``labels`` is not an array of an integer dtype, or ``end_of_text``
            or ``ignore_index`` not an integer.
        ValueError: ``tokens`` is a scalar, ``end_of_text`` is negative, the shapes differ, a label
            of an unsigned dtype or ``ignore_index`` is not an int32, or the dtype of the labels has
            no ``ignore_index``.
    """
    _check_tokens(tokens=tokens, labels=labels)
    if labels.shape != tokens.shape:
        raise ValueError(
            f"labels has shape {labels.shape}; it must be that of tokens, {tokens.shape}"
        )
    if np.issubdtype(labels.dtype, np.unsignedinteger):
        if (largest := int(labels.max(initial=0))) >= 2**31:
            raise ValueError(f"labels has {largest}; the largest label is {2**31 - 1}")
        labels = labels.astype(np.int32)
    ignored = as_integer("ignore_index", ignore_index)
    if not -(2**31) <= ignored < 2**31:
        raise ValueError(f"ignore_index is {ignored}; it must be an int32")
    try:
        label = np.asarray(ignored, labels.dtype)
    except OverflowError as error:
        raise ValueError(f"ignore_index is {ignored}; the labels are {labels.dtype}") from error
    return np.where(_is_end(tokens, end_of_text), label, labels)


def _check_tokens(**arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not np.issubdtype(dtype, np.integer):
            found = f"type {type(array).__name__}" if dtype is None else f"dtype {dtype}"
            raise TypeError(f"{name} has {found}; it must be an integer array")
        if not array.ndim:
            raise ValueError(f"{name} has shape (); it must have one axis or more")


def _is_end(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    return tokens == as_integer("end_of_text", end_of_text, least=0)
