"""Data: text files to token shards, and token shards to batches."""

from jaxllm.data.document_mask import find_documents, ignore_next_document
from jaxllm.data.shard_format import read_shard, write_shard
from jaxllm.data.shards import (
    STANDARD_LIBRARY_SKIP,
    Dataset,
    Summary,
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
    "STANDARD_LIBRARY_SKIP",
    "Dataset",
    "Summary",
    "batch",
    "batch_in_order",
    "build",
    "check_vocabulary",
    "ensure_standard_library",
    "find_documents",
    "find_texts",
    "ignore_next_document",
    "num_windows",
    "open_dataset",
    "open_split",
    "read_shard",
    "standard_library",
    "write_shard",
]
