"""What a CPU computes with."""

from __future__ import annotations

import pytest
import torch

from pippin.backends.torch import streams


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_is_left_out_where_it_does_not_multiply_the_models_type(
    supported: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch warns of it in the middle of a step; what the process had set is restored."""
    monkeypatch.setattr(streams, "has_bfloat16_products", lambda: supported)
    before = torch._C._get_mkldnn_enabled()
    with streams.make_streams(torch.device("cpu"), dtype).forward():
        is_on = torch._C._get_mkldnn_enabled()
    assert is_on == (before and (supported or dtype != torch.bfloat16))
    assert torch._C._get_mkldnn_enabled() == before
