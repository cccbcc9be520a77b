"""Mamba-2 layers as Granite 4's and Bamba's config.json describe them."""

from __future__ import annotations

from typing import Any

from pippin.backends.torch.families.numbers import read_number
from pippin.backends.torch.shapes import MambaShape


def read_mamba(config: dict[str, Any]) -> MambaShape:
    inner = int(config.get("mamba_expand") or 2) * int(config["hidden_size"])
    heads = int(config["mamba_n_heads"])
    least, most = config.get("time_step_limit") or (0.0, "inf")
    return MambaShape(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=int(config["mamba_n_groups"]),
        state_dim=int(config["mamba_d_state"]),
        num_taps=int(config["mamba_d_conv"]),
        least_dt=read_number(least),
        most_dt=read_number(most),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias")),
        eps=float(config["rms_norm_eps"]),
    )
