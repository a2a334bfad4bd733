"""From files of text to batches of tokens."""

from jaxllm.data.shards import (
    Dataset,
    batch,
    batch_in_order,
    build,
    check_vocabulary,
    ensure_standard_library,
    find_texts,
    num_windows,
    open_dataset,
    open_split,
    standard_library,
)

__all__ = [
    "Dataset",
    "batch",
    "batch_in_order",
    "build",
    "check_vocabulary",
    "ensure_standard_library",
    "find_texts",
    "num_windows",
    "open_dataset",
    "open_split",
    "standard_library",
]
