"""What a model is made of, layer by layer, as numbers and switches.

Layers of one model may differ in everything that is said of a layer here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from pippin.types import Component

# Norms of queries and keys: of each head, or of all heads' channels together.
QkNorm = Literal["head", "all"]
ActivationKind = Literal["silu", "gelu_tanh", "clamped"]
# How routers weigh experts. `sigmoid`: each by itself, and a bias helps to choose.
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Quantization:
    method: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RopeShape:
    dim: int  # of a head's channels, how many are rotated: the first ones
    theta: float
    kind: str = "default"
    options: dict[str, Any] = field(default_factory=dict)  # of the kind
    max_len: int = 0


NO_ROPE = RopeShape(0, 1.0)  # keys say nothing of their position


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeShape
    scale: float  # of scores
    rope_pairs: bool = False  # as stored, a channel turns with its neighbour
    window: int = 0  # tokens that one sees, itself included; 0: all before it
    keeps_all: bool = False  # keys that have fallen behind the window, too
    softcap: float = 0.0  # scores stay below it; 0: there is none
    sinks: bool = False  # a score for each head that no value belongs to
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False  # which products have a bias
    out_bias: bool = False
    gated: bool = False

    @property
    def kv_parts(self) -> tuple[int, ...]:
        """Of what is kept of a token: keys and values, heads, channels."""
        return (2, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class LatentShape:
    """Attention whose keys and values are made of one small vector a token."""

    num_heads: int
    rank: int  # of that vector, which is kept
    rope: RopeShape  # of channels that queries and keys have beside it
    plain_dim: int  # of a head's query and key: channels that are not rotated
    value_dim: int
    query_rank: int  # queries are made of a vector of that size; 0: of the layer's input
    scale: float  # of scores
    bias: bool = False
    rope_pairs: bool = True  # as stored, a channel turns with its neighbour
    window: int = 0  # there is none

    @property
    def kv_parts(self) -> tuple[int, ...]:
        return (1, 1, self.rank + self.rope.dim)


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

    @property
    def num_gates(self) -> int:
        """Inputs of a token that the recurrence reads beside what is convolved."""
        return 2 * self.num_v_heads

    @property
    def state_parts(self) -> tuple[int, int, int]:
        """Of the state: heads, keys' channels, values' channels."""
        return (self.num_v_heads, self.k_dim, self.v_dim)


@dataclass(frozen=True)
class ConvShape:
    """A short convolution alone (LFM2): its last inputs are its state."""

    num_channels: int
    num_taps: int
    bias: bool = False  # of the convolution and of both products
    num_gates: int = 0
    state_parts: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Activation:
    """Of a gate, which is multiplied with what goes up. Clamped: gate and up stay below `limit`,
    the gate is sharper by `alpha`, and 1 is added to what goes up."""

    kind: ActivationKind = "silu"
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True)
class DenseShape:
    intermediate: int
    bias: bool = False
    gated: bool = True  # else the squares of what is above zero
    activation: Activation = Activation()


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    num_chosen: int
    intermediate: int
    normalised: bool  # the chosen ones' weights add up to 1
    shared_intermediate: int = 0  # of the expert that every token goes to; 0: there is none
    shared_gated: bool = True
    bias: bool = False  # of experts and of their router
    activation: Activation = Activation()
    scoring: Scoring = "softmax"
    num_groups: int = 1  # of experts: those of the best groups may be chosen
    num_groups_chosen: int = 1
    scale: float = 1.0  # of the chosen ones' weights
    group_best: int = 2  # a group is as good as so many of its best experts
    gated: bool = True  # else the squares of what is above zero


@dataclass(frozen=True)
class MambaShape:
    """A Mamba-2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int  # of heads that share B and C
    state_dim: int
    num_taps: int
    least_dt: float = 0.0  # of time steps
    most_dt: float = math.inf
    conv_bias: bool = True
    bias: bool = False  # of both products
    eps: float = 1e-5

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: x, B, C."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def num_gates(self) -> int:
        return self.num_heads

    @property
    def state_parts(self) -> tuple[int, int, int]:
        return (self.num_heads, self.state_dim, self.head_dim)


RecurrentShape = DeltaShape | ConvShape | MambaShape
CellShape = AttentionShape | LatentShape  # of layers that keep cells
MixerShape = CellShape | RecurrentShape
MlpShape = DenseShape | ExpertShape
AnyMixer = TypeVar("AnyMixer", AttentionShape, LatentShape, DeltaShape, ConvShape, MambaShape)


@dataclass(frozen=True)
class LayerShape:
    """Either may be missing."""

    mixer: MixerShape | None
    mlp: MlpShape | None

    @property
    def kind(self) -> Component | None:
        """What the pools hold of its tokens, if they do."""
        if self.mixer is None:
            return None
        if not isinstance(self.mixer, CellShape):
            return Component.STATE
        releases = isinstance(self.mixer, AttentionShape) and not self.mixer.keeps_all
        return Component.WINDOW if releases and self.mixer.window else Component.ATTENTION


@dataclass(frozen=True)
class NormNames:
    """Of a layer's norms: before and behind attention, before and behind what follows it; "": there
    is none."""

    input: str = "input_layernorm"
    mixed: str = ""
    mlp: str = "post_attention_layernorm"
    fed: str = ""


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
    norms: NormNames = NormNames()
    norm_offset: float = 0.0  # a norm's weight is stored less this
    centred_norms: bool = False  # they subtract the mean
    parallel: bool = False  # a layer's feed-forward part reads what its attention reads
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    renamed: tuple[tuple[str, str], ...] = ()  # parts of weights' names: Llama's, and its own
    quantization: Quantization | None = None  # None: all weights are dense

    def mixers(self, kind: type[AnyMixer]) -> list[AnyMixer]:
        """Of the layers that mix tokens so, in their order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, kind)]

    @property
    def recurrent(self) -> RecurrentShape | None:
        """Of its recurrent layers: they are all alike."""
        mixers = (layer.mixer for layer in self.layers if layer.kind is Component.STATE)
        return next((mixer for mixer in mixers if isinstance(mixer, RecurrentShape)), None)

    def stored_name(self, name: str) -> str:
        """Of a weight, in the checkpoint."""
        for ours, stored in self.renamed:
            name = name.replace(ours, stored)
        return name

    @property
    def window(self) -> int:
        """Tokens that the widest one sees of those whose cells are released behind it; 0 without
        one."""
        mixers = self.mixers(AttentionShape)
        return max((mixer.window for mixer in mixers if not mixer.keeps_all), default=0)

    def keeping_all(self) -> ModelShape:
        """With the cells of windows among those of layers that see everything, in one table."""
        layers = (
            replace(layer, mixer=replace(layer.mixer, keeps_all=True))
            if isinstance(layer.mixer, AttentionShape)
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))
