"""The MTP head on torch: its drafts against transformers' own layers, and replies with and without.

Transformers drops the head's weights, so one of its decoder layers is given them by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch
from safetensors.torch import load_file

from bundled import BUNDLED_PATH
from pippin.backends.base import DecodeRow, PrefillRow, Retire
from pippin.backends.sampling.noise import noise_keys, stream_of
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.drafts import make
from pippin.backends.torch.step.noise import add_gumbel_noise
from reference import BUNDLED
from test_contract import Steps, admit, make_tokens, restore
from test_draft_contract import MAX_DEPTH, NUM_SLOTS, Reply, started
from torch_families import checkpoint
from torch_serving import make_torch_backend

NAMES = ("qwen3_5_mtp", "qwen3_next_mtp")
SAMPLED = {"temperature": 1.0, "seed": 5}


def make_backend(name: str, **kwargs: Any) -> TorchBackend:
    options = {"num_slots": NUM_SLOTS, "max_depth": MAX_DEPTH, "mtp": True} | kwargs
    return make_torch_backend(name, **options)


def drafts_of(steps: Steps, slot: int, num_drafts: int = MAX_DEPTH) -> list[int]:
    assert isinstance(steps.backend, TorchBackend)
    found: list[int] = steps.backend._future_map.drafts[slot, :num_drafts].tolist()
    return found


# ---- against transformers ------------------------------------------------------------------------


class Reference:
    """The head, over a whole text at once and without a cache."""

    def __init__(self, name: str) -> None:
        import transformers

        path = BUNDLED_PATH if name == BUNDLED else checkpoint(name)
        transformers.utils.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model, self._head = model.eval().model, model.lm_head
        config = self._model.config
        index = config.layer_types.index("full_attention")
        cls, norm = type(self._model.layers[index]), type(self._model.norm)
        layer, norms = cls(config, index).eval(), {}
        stored = {
            name.removeprefix("mtp."): weight.float()
            for name, weight in load_file(path / "model.safetensors").items()
            if name.startswith("mtp.")
        }
        own = {n.removeprefix("layers.0."): w for n, w in stored.items() if n.startswith("layers.")}
        layer.load_state_dict(_fused(own, layer.state_dict().keys()))
        for part in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            norms[part] = norm(config.hidden_size, eps=config.rms_norm_eps)
            norms[part].weight.data = stored[f"{part}.weight"]
        self._layer, self._norms, self._fc = layer, norms, stored["fc.weight"]

    @torch.no_grad()
    def drafts(
        self,
        text: Sequence[int],  # with the token that was sampled last
        num_drafts: int,
        choose: Callable[[torch.Tensor, int], int] = lambda logits, _: int(logits.argmax()),
        first: int = 0,  # that the head knows,
        window: int = 1 << 20,  # and how many of these
    ) -> list[int]:
        tokens = [*text[first + 1 :]]
        hidden = self._model(torch.tensor([text[:-1]])).last_hidden_state[0][first:]
        found = []
        for number in range(num_drafts):
            hidden = torch.cat([hidden, self._run(hidden, tokens, first, window)])
            found.append(choose(self._head(hidden[-1]), len(text) + number))
            tokens.append(found[-1])
        return found

    def _run(
        self, hidden: torch.Tensor, tokens: list[int], first: int, window: int
    ) -> torch.Tensor:
        embedded = self._model.embed_tokens(torch.tensor(tokens))
        parts = [self._norms["pre_fc_norm_embedding"](embedded)]
        parts.append(self._norms["pre_fc_norm_hidden"](hidden))
        x = (torch.cat(parts, dim=-1) @ self._fc.T)[None]
        places = torch.arange(first, first + len(tokens))
        behind = places[:, None] - places
        mask = torch.where((behind >= 0) & (behind < window), 0.0, -torch.inf)[None, None]
        rotation = self._model.rotary_emb(x, places[None])
        found = self._layer(x, position_embeddings=rotation, attention_mask=mask)
        return self._norms["norm"](found)[0, -1:]


def _fused(weights: dict[str, torch.Tensor], wanted: Any) -> dict[str, torch.Tensor]:
    """Experts that are stored one by one, as transformers holds them."""
    if "mlp.experts.gate_up_proj" not in wanted or "mlp.experts.gate_up_proj" in weights:
        return weights
    own = {n: w for n, w in weights.items() if ".experts." not in n}
    num_experts = len({n.split(".")[2] for n in weights if ".experts." in n})

    def of(expert: int, part: str) -> torch.Tensor:
        return weights[f"mlp.experts.{expert}.{part}_proj.weight"]

    gate_up = [torch.cat([of(e, "gate"), of(e, "up")]) for e in range(num_experts)]
    own["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    own["mlp.experts.down_proj"] = torch.stack([of(e, "down") for e in range(num_experts)])
    return own


reference = cache(Reference)


def drawn(seed: int, prompt_len: int, logits: torch.Tensor, position: int) -> int:
    """With the noise that the model itself has at a position."""
    keys = noise_keys(np.array([stream_of(seed)], dtype=np.uint64), [position - prompt_len])
    words = torch.from_numpy(np.ascontiguousarray(keys).view(np.int32).reshape(1, 2))
    return int(add_gumbel_noise(logits[None], words).argmax())


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(
    ("name", "params"), [(BUNDLED, {}), (NAMES[0], SAMPLED), (NAMES[1], {}), (NAMES[1], SAMPLED)]
)
def test_drafts_are_those_of_transformers_layers(name: str, params: dict[str, Any]) -> None:
    """Behind a prompt in two chunks, a token a step, and drafts of which some are accepted."""
    steps, prompt = Steps(make_backend(name)), make_tokens(24, 3)
    choose = partial(drawn, params["seed"], len(prompt)) if params else None
    text = prompt.tolist()

    def check(first: int = 0) -> None:
        options = {} if choose is None else {"choose": choose}
        assert drafts_of(steps, 2) == reference(name).drafts(
            text, MAX_DEPTH, first=first, **options
        )

    steps.run(admit=(admit(2, prompt, **params),), prefill=(PrefillRow(2, 0, prompt[:1]),))
    chunk = PrefillRow(2, 1, prompt[1:], samples=True, num_drafts=MAX_DEPTH)
    text += steps.run(prefill=(chunk,)).tokens[2]
    check(first=1)  # what follows a chunk is not known with it
    for depth in (0, 2, MAX_DEPTH, 1):
        row = DecodeRow(2, len(text) - 1, depth=depth, num_drafts=MAX_DEPTH)
        text += steps.run(decode=(row,)).tokens[2]
        check(first=1)


@pytest.mark.filterwarnings("ignore")
def test_a_long_text_is_seen_as_far_as_the_ring_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "LENGTH", 8)
    steps, prompt = Steps(make_backend("qwen3_5_mtp")), make_tokens(30, 4)
    chunk = PrefillRow(1, 0, prompt, samples=True, num_drafts=2)
    text = [*prompt, *steps.run(admit=(admit(1, prompt),), prefill=(chunk,)).tokens[1]]
    for depth in (2, 0, 2, 1):
        assert drafts_of(steps, 1, 2) == reference("qwen3_5_mtp").drafts(text, 2, window=8)
        row = DecodeRow(1, len(text) - 1, depth=depth, num_drafts=2)
        text += steps.run(decode=(row,)).tokens[1]


# ---- what the head remembers ---------------------------------------------------------------------


def test_a_request_sees_nothing_of_the_one_before_in_its_slot() -> None:
    """Nor numbers that are none."""
    found = []
    for poison in (False, True):
        steps = Steps(make_backend("qwen3_5_mtp"))
        if poison:
            started(steps, Reply("torch, qwen3_5", 3, 64))
            drafter = steps.backend._runner._drafts._drafter  # type: ignore[attr-defined]
            with torch.inference_mode():
                drafter.ring.kv[0].fill_(torch.nan)
            steps.run(retire=(Retire(3),))
        prompt = make_tokens(6, 1)
        row = PrefillRow(3, 0, prompt, samples=True, num_drafts=MAX_DEPTH)
        steps.run(admit=(admit(3, prompt),), prefill=(row,))
        found.append(drafts_of(steps, 3))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_a_prompt_that_is_restored_whole_is_drafted_from_its_hidden_vector() -> None:
    steps, prompt = Steps(make_backend("qwen3_5_mtp")), make_tokens(20, 2)
    row = PrefillRow(1, 0, prompt, samples=True, captures=True, checkpoints=(20,))
    captures = steps.run(admit=(admit(1, prompt),), prefill=(row,)).captures
    empty = PrefillRow(2, 20, prompt[:0], samples=True, restore=restore(captures, 20), num_drafts=3)
    text = [*prompt, *steps.run(admit=(admit(2, prompt),), prefill=(empty,)).tokens[2]]
    assert drafts_of(steps, 2, 3) == reference("qwen3_5_mtp").drafts(text, 3, first=19)


def test_the_head_is_loaded_where_drafts_are_wanted_alone(caplog: pytest.LogCaptureFixture) -> None:
    def of(path: Any, **kwargs: Any) -> int:
        backend = TorchBackend.load(path, num_slots=2, dtype="float32", **kwargs)
        backend.close()
        return backend.drafts_itself

    path = checkpoint("qwen3_5_mtp")
    caplog.set_level("INFO")
    assert of(path, max_depth=3, mtp=True) > 0
    assert of(path, max_depth=3) == of(path, mtp=True) == 0
    assert of(path, max_depth=3, mtp=True, deterministic=True) == 0
    assert "no drafts are verified: with --deterministic" in caplog.text
    assert "MTP" not in caplog.text
    assert of(checkpoint("qwen3"), max_depth=3, mtp=True) == 0
    assert "the checkpoint has no MTP head" in caplog.text


def test_what_the_head_remembers_is_in_the_budget() -> None:
    budget = 64 << 20
    left = [make_backend("qwen3_5_mtp", mtp=mtp).limit_memory(budget) for mtp in (False, True)]
    backend = make_backend("qwen3_5_mtp")
    drafter = backend.runner._drafts._drafter  # type: ignore[union-attr]
    held = sum(tensor[1:].nbytes for tensor in (drafter.ring.kv[0], drafter.ring.tags))
    assert 0 < 0.9 * held < left[0] - left[1]
