"""What a model is made of, layer by layer, as numbers and switches. Knows no config and no weights.

Layers of one model may differ in everything that is said of a layer here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pippin.types import Component


@dataclass(frozen=True)
class RopeShape:
    dim: int  # of a head's channels, how many are rotated: the first ones
    theta: float
    kind: str = "default"
    options: dict[str, Any] = field(default_factory=dict)  # of the kind
    max_len: int = 0


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeShape
    window: int = 0  # tokens that one sees, itself included; 0: all before it
    qk_norm: bool = False
    qkv_bias: bool = False  # which products have a bias
    out_bias: bool = False
    gated: bool = False

    @property
    def kv_parts(self) -> tuple[int, ...]:
        """Of what is kept of a token: keys and values, heads, channels."""
        return (2, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class DeltaShape:
    """A Gated DeltaNet layer."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_taps: int  # of the convolution
    interleaved: bool  # its projections are stored head by head (qwen3_next)

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(frozen=True)
class DenseShape:
    intermediate: int
    bias: bool = False


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    num_chosen: int
    intermediate: int
    normalised: bool  # the chosen ones' weights add up to 1
    shared_intermediate: int = 0  # of the expert that every token goes to; 0: there is none


MixerShape = AttentionShape | DeltaShape
MlpShape = DenseShape | ExpertShape
AnyMixer = TypeVar("AnyMixer", AttentionShape, DeltaShape)


@dataclass(frozen=True)
class LayerShape:
    mixer: MixerShape
    mlp: MlpShape

    @property
    def kind(self) -> Component:
        """What the pools hold of its tokens."""
        if not isinstance(self.mixer, AttentionShape):
            return Component.STATE
        return Component.WINDOW if self.mixer.window else Component.ATTENTION


@dataclass(frozen=True)
class ModelShape:
    model_type: str
    prefix: str  # of the weights' names
    vocab_size: int
    hidden: int
    eps: float
    max_len: int
    tied: bool
    layers: tuple[LayerShape, ...]
    norm_offset: float = 0.0  # a norm's weight is stored less this

    def mixers(self, kind: type[AnyMixer]) -> list[AnyMixer]:
        """Of the layers that mix tokens so, in their order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, kind)]

    @property
    def delta(self) -> DeltaShape | None:
        """Of its recurrent layers: they are all alike."""
        return next(iter(self.mixers(DeltaShape)), None)

    @property
    def window(self) -> int:
        """Tokens that the widest one sees; 0 without one."""
        return max((mixer.window for mixer in self.mixers(AttentionShape)), default=0)
