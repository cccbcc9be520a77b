"""One Config of frozen sections; the command line is generated from these fields.

The string after each field is its help text. `"auto"` is resolved once, at start-up, into a new
Config (see `startup/resolve.py`); nothing later looks at an unresolved value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pippin.config.engine import BackendName, EngineConfig, LimitsConfig, ModelConfig, Speculate
from pippin.config.peers import PeersConfig
from pippin.config.server import ServerConfig

__all__ = [
    "BackendName",
    "Config",
    "EngineConfig",
    "LimitsConfig",
    "ModelConfig",
    "PeersConfig",
    "ServerConfig",
    "Speculate",
]


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
