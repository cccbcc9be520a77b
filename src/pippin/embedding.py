"""Embedding requests and their vectors: shared by the server and `LLM`.

The vector of a text is what the model's head reads after its last token, at length 1: the last
token is the only one that has seen all of the text, and models that are made for embeddings out of
decoders (Qwen3-Embedding, E5-Mistral, GTE-Qwen2) are trained to be read there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pippin.errors import PippinError
from pippin.messages import Submit, TokenDelta, pack_tokens
from pippin.sequences import error_of_delta
from pippin.types import SamplingParams

# A row that ends its prompt always draws a token: here the cheapest one, which is dropped.
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def embedding_submit(
    id: str, tokens: Sequence[int], *, priority: int = 0, salt: bytes = b""
) -> Submit:
    return Submit(id, pack_tokens(tokens), _ONE_TOKEN, priority=priority, salt=salt, embeds=True)


def embedding_of(delta: TokenDelta) -> np.ndarray:
    """float32 [hidden], at length 1; raises if the request failed or was aborted."""
    if delta.finish == "error" or delta.finish == "abort":
        raise error_of_delta(delta)
    assert delta.embedding is not None, "an embedding ends with its vector"
    return unit(np.frombuffer(delta.embedding, dtype=np.float32))


def unit(vector: np.ndarray) -> np.ndarray:
    """The same direction, at length 1."""
    length = np.linalg.norm(vector)
    if not np.isfinite(length) or length == 0.0:
        raise PippinError("the model's hidden vector has no direction")
    return np.asarray(vector / length, dtype=np.float32)
