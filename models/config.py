# SPDX-License-Identifier: Apache-2.0
"""The transformer's config, and the published shapes."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

_CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rope"),
    "mlp": ("gelu", "swiglu"),
    "remat": ("full", "none"),
    "attention": (None, "xla", "cudnn"),
}


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model; the defaults are GPT-2's choices. Bad sizes raise ValueError.

    `loss_chunk` is how many tokens of each row have their logits in memory at a time. `attention`
    None lets `attention_implementation` choose.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    d_model: int
    d_ff: int
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    positions: Literal["learned", "rope"] = "learned"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    remat: Literal["full", "none"] = "full"
    prefetch: int = 1
    regather: bool = True
    loss_chunk: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention: Literal["xla", "cudnn"] | None = None

    def __post_init__(self):
        where = "TransformerConfig"
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in allowed or isinstance(getattr(self, field), bool):
                value = getattr(self, field)
                raise ValueError(f"{where}.{field}: {value!r} is unknown; choose one of {allowed}.")
        for field, value in vars(self).items():
            if type(value) is int and value < 1 and field != "prefetch":
                raise ValueError(f"{where}.{field}: {value} is not positive; give at least 1.")
        d, h, k = self.d_model, self.num_heads, self.num_kv_heads
        if d % h:
            raise ValueError(
                f"{where}.d_model: {d} does not divide by num_heads={h}; the next size that does "
                f"is {-(-d // h) * h}."
            )
        if h % k:
            raise ValueError(
                f"{where}.num_kv_heads: num_heads={h} is not a multiple of {k}; try "
                f"num_kv_heads={math.gcd(h, k)}."
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(
                f"{where}.positions: 'rope' turns pairs, and d_model / num_heads = "
                f"{self.head_dim} is odd; try d_model={d + h}."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"{where}.dropout: {self.dropout} is not in [0, 1); give a probability such as 0.1."
            )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.num_heads


_Llama = functools.partial(
    TransformerConfig, norm="rmsnorm", positions="rope", mlp="swiglu", bias=False, tied=False
)

# Published shapes: vocabulary, tokens, layers, heads, key and value heads, d_model, d_ff. The ZeRO
# paper's running example of 7.5B parameters (arXiv 1910.02054, Table I) is a count without a shape:
# here it is the 7.5B GPT of Megatron-LM (arXiv 2104.04473, Table 1). GPT-2's init_std is meant for
# wider layers than tiny's.
PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(
        256, 128, 4, 4, 4, 128, 512, init_std=0.06, remat="none", loss_chunk=64
    ),
    "gpt2-124m": TransformerConfig(50257, 1024, 12, 12, 12, 768, 3072),
    "gpt2-1.5b": TransformerConfig(50257, 1024, 48, 25, 25, 1600, 6400),
    "gpt-7.5b": TransformerConfig(51200, 2048, 36, 32, 32, 4096, 16384),
    "llama2-7b": _Llama(32000, 4096, 32, 32, 32, 4096, 11008),
    "llama3-8b": _Llama(128256, 8192, 32, 32, 8, 4096, 14336, rope_theta=500_000.0),
    "llama3-70b": _Llama(128256, 8192, 80, 64, 8, 8192, 28672, rope_theta=500_000.0),
}


def preset(name: str, **changes: Any) -> TransformerConfig:
    """Return the preset of that name, with the changes that are not None.

    >>> preset("tiny", num_layers=2, seq_len=None).num_layers
    2
    """
    given = {field: value for field, value in changes.items() if value is not None}
    return dataclasses.replace(PRESETS[name], **given)
