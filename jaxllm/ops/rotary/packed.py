"""The rotation of a projection that holds queries, keys and values, over itself.

Attention of a projection needs no unrotated queries and keys. The CUDA kernel writes over them, so
the projection is in memory once, and nothing is rotated again in the backward pass.
"""

from __future__ import annotations

import dataclasses

from jaxllm.core.dispatch import Op
from jaxllm.core.op import differentiable
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.rotary import cuda, reference


@dataclasses.dataclass(frozen=True)
class PackedRotation:
    """The static options of the rotation of a projection.

    Attributes:
        heads: Query heads.
        kv_heads: Key heads, which divide ``heads``.
        interleaved: Whether the columns that rotate as a pair are neighbours.
        by_parts: Whether the projection is (B, T, N/K + 2, K, H), and no (B, T, (N + 2K) H).
    """

    heads: int
    kv_heads: int
    interleaved: bool
    by_parts: bool

    @property
    def static(self) -> dict[str, int]:
        """The options of the op."""
        names = ("heads", "kv_heads", "interleaved")
        return {name: getattr(self, name) for name in names}


def _sharding(*, by_parts: bool) -> ShardingRule:
    names, sharded = ("B T _ N _", "B T N") if by_parts else ("B T P", "B T")
    return ShardingRule(f"{names}, B T R, B T R -> {names}", sharded)


ROPE_PACKED = Op(
    "rope_packed",
    reference=reference,
    # No Pallas kernel: its attention reads queries, keys and values that are apart.
    cuda=cuda,
    sharding=lambda qkv, *_, **__: _sharding(by_parts=qkv.ndim == 5),
)
"""``(qkv, cos, sin)``: a projection in either shape of ``flash_attention_packed``, with queries and
keys rotated as by ``rope``.
"""

rope_packed = differentiable(
    ROPE_PACKED,
    saves=lambda qkv, cos, sin, _: (cos, sin),
    sharding=lambda options: _sharding(by_parts=options.by_parts),
    arrange=lambda cos, sin, dqkv: (dqkv, cos, sin),
    # A remat policy that keeps the projection keeps it rotated: that is what attention saves.
    name="linear",
)
