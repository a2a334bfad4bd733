"""The peer: GPT-2 and its training step in plain torch under torch.compile, without JAX.

It is what an experienced torch user would write: float32 parameters under ``torch.autocast``,
cuDNN's attention, one compiled graph from tokens to gradients, fused AdamW. The residual stream is
bfloat16 from the embedding on, as in the JAX implementations; with autocast alone it would be
float32, and twice the bytes. The norms and the loss compute in float32, inside fused kernels. The
embedding, and so the sum of its gradient, is float32, for which GPUs have fast atomics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# In order: on Hopper cuDNN is faster than FlashAttention 2; the last one also takes float32.
_FUSED_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of the model, and how it is compiled.

    Attributes:
        layers: Blocks.
        heads: Attention heads.
        width: The residual stream's width.
        max_seq_len: Positions.
        vocab_size: Rows of the token table; 50304 is GPT-2's 50257 rounded up.
        dtype: The compute dtype: ``"bfloat16"``, or ``"float32"`` for no autocast.
        fused_attention: Whether one kernel runs attention, preferably cuDNN's, instead of matmuls.
        compiler: The ``backend`` of ``torch.compile``; ``"aot_eager"`` needs no C++ compiler.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    max_seq_len: int = 1024
    vocab_size: int = 50304
    dtype: str = "bfloat16"
    fused_attention: bool = True
    compiler: str = "inductor"


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.ln1 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.ln2 = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream (B, T, D) after the block."""
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """The model, whose ``forward`` is the loss; the LM head is the token table."""

    def __init__(self, config: Config):
        super().__init__()
        self.dtype = getattr(torch, config.dtype)
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.max_seq_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        # Norms start with ones and zeros. Other parameters are initialized as in GPT-2.
        residual_std = 0.02 / math.sqrt(2 * config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=residual_std if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of the labels, in float32."""
        x = (self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]).to(self.dtype)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def make_step(
    config: Config, device: str
) -> tuple[GPT2, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Makes the model, and the ``step(tokens, labels) -> loss`` that trains it in place."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32
    with torch.device(device):
        model = GPT2(config)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    # The graphs of forward and backward are compiled together.
    compiled = torch.compile(model, backend=config.compiler, dynamic=False, fullgraph=True)
    attention = _FUSED_ATTENTION if config.fused_attention else SDPBackend.MATH
    autocast = torch.autocast(device, torch.bfloat16, enabled=config.dtype == "bfloat16")

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(attention, set_priority=True), autocast:
            loss = compiled(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step
