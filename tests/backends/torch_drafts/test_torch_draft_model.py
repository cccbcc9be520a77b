"""A draft model on torch: one that is the model itself is always right, and no other changes a
token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch
from test_speculated_replies import prompts_of

from builders import Client
from pippin.backends.base import DecodeRow, PrefillRow, Retire
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.drafts import model_drafter
from pippin.backends.torch.drafts.entries import Entries
from pippin.backends.torch.load import load
from pippin.errors import LoadError
from pippin.scheduler.speculation import DeviceDrafter, Speculation
from serving import DRAFTED_BY, TORCH, make_client
from test_contract import Steps, admit, make_tokens, restore
from test_draft_contract import MAX_DEPTH, NUM_SLOTS, OWN_DRAFTS, Reply
from torch_families import checkpoint
from torch_serving import make_torch_backend, path_of
from transformers_families import written_model

SAMPLED = {"temperature": 1.0, "seed": 5}
OWN = f"torch, {OWN_DRAFTS}"


def make_backend(draft: str = "qwen3", **kwargs: Any) -> TorchBackend:
    options = {"num_slots": NUM_SLOTS, "max_depth": MAX_DEPTH} | kwargs
    return make_torch_backend("qwen3", draft=draft, **options)


def speculation(depth_of: Callable[[int], int]) -> Speculation:
    """`depth_of`: the number of a choice."""
    numbers = count()
    return Speculation(
        None,
        MAX_DEPTH,
        lambda _: depth_of(next(numbers)),
        device=DeviceDrafter("draft", MAX_DEPTH),
    )


# ---- what it has read ----------------------------------------------------------------------------


def assert_all_are_right(steps: Steps, reply: Reply, wanted: tuple[int, ...]) -> None:
    """`wanted`: drafts that each of the next steps leaves."""
    for num_drafts in wanted:
        row = reply.own_row(num_drafts)
        assert reply.settle(steps.run(decode=(row,))) == row.depth
    reply.check()


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_model_itself_is_always_right(params: dict[str, Any]) -> None:
    """Behind a prompt in two chunks, and behind steps without drafts that it has not read."""
    steps, reply = Steps(make_backend()), Reply(OWN, 2, params=params)
    who = admit(2, reply.prompt, **params)
    steps.run(admit=(who,), prefill=(PrefillRow(2, 0, reply.prompt[:7]),))
    chunk = PrefillRow(2, 7, reply.prompt[7:], samples=True, num_drafts=3)
    reply.depths.append(0)
    reply.num_left = 3
    reply.settle(steps.run(prefill=(chunk,)))
    assert_all_are_right(steps, reply, (4, 0, 0, 0, 0, 2, 1, 0, 0, 3, 4, 0))


def test_a_prompt_whose_reply_starts_without_drafts_is_read_later() -> None:
    steps, reply = Steps(make_backend()), Reply(OWN, 1)
    reply.settle(steps.run(**reply.start()))
    assert_all_are_right(steps, reply, (0, 0, 3, 4, 4, 0))


@pytest.mark.parametrize("num_restored", [13, 20], ids=["a part", "whole"])
def test_a_restored_prompt_is_read(num_restored: int) -> None:
    steps, reply = Steps(make_backend()), Reply(OWN, 2)
    prompt = reply.prompt
    first = PrefillRow(1, 0, prompt[:num_restored], captures=True, samples=num_restored == 20)
    captures = steps.run(admit=(admit(1, prompt),), prefill=(first,)).captures
    rest = PrefillRow(
        2,
        num_restored,
        prompt[num_restored:],
        samples=True,
        restore=restore(captures, num_restored),
        num_drafts=4,
    )
    reply.depths.append(0)
    reply.num_left = 4
    reply.settle(steps.run(admit=(admit(2, prompt),), prefill=(rest,)))
    assert_all_are_right(steps, reply, (4, 2, 0, 3, 0))


def test_a_resumed_reply_is_read() -> None:
    steps, reply = Steps(make_backend()), Reply(OWN, 2)
    said = np.array(reply.expected.tokens[:6], dtype=np.int32)
    known = np.concatenate([reply.prompt, said])
    reply.tokens += said.tolist()
    reply.bound, reply.num_left = len(known), 4
    reply.depths.append(0)
    row = PrefillRow(2, 0, known, samples=True, num_drafts=4)
    reply.settle(steps.run(admit=(admit(2, reply.prompt, reply=said),), prefill=(row,)))
    assert_all_are_right(steps, reply, (4, 2, 0, 3, 0))


def test_of_a_long_text_the_end_is_read_and_its_start_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring of 24 tokens, the first 4 of them kept: drafts of the model over just these."""
    defaults = (model_drafter.run_plain, 24)
    monkeypatch.setattr(model_drafter.ModelDrafter.__init__, "__defaults__", defaults)
    steps, prompt = Steps(make_backend()), make_tokens(60, 4)
    row = PrefillRow(1, 0, prompt, samples=True, num_drafts=1)
    text = [*prompt, *steps.run(admit=(admit(1, prompt),), prefill=(row,)).tokens[1]]
    backend = steps.backend
    assert isinstance(backend, TorchBackend)
    first = len(text) - 12
    for _ in range(16):
        assert backend._future_map.drafts[1, 0] == reference_draft(text[first:])
        row_of = DecodeRow(1, len(text) - 1, depth=1, num_drafts=1)
        text += steps.run(decode=(row_of,)).tokens[1]


@cache
def reference() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    path = checkpoint("qwen3")
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def reference_draft(text: list[int]) -> int:
    """By transformers: each token sees the first 4, and the last 20."""
    places = torch.arange(len(text))
    behind = places[:, None] - places
    seen = (behind >= 0) & ((behind < 20) | (places < 4))
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    tokens = torch.tensor([[int(token) for token in text]])
    return int(reference()(tokens, attention_mask=mask).logits[0, -1].argmax())


def test_a_request_sees_nothing_of_the_one_before_in_its_slot() -> None:
    """Nor numbers that are none."""
    steps = Steps(make_backend())
    reply = Reply(OWN, 3, 64)
    reply.settle(steps.run(**reply.start(num_drafts=4)))
    model = steps.backend._runner._drafts._drafter  # type: ignore[attr-defined]
    with torch.inference_mode():
        for kv in model.ring.kv:
            kv.fill_(torch.nan)
    after = Reply(OWN, 3)
    started = after.start(num_drafts=4)
    after.settle(steps.run(retire=(Retire(3),), **started))
    assert_all_are_right(steps, after, (4, 4, 0))


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_draft_model_attends_as_its_family_does(name: str) -> None:
    """With caps, norms, scales, sinks, windows, experts: the logits are those of transformers."""
    model, path = written_model(name)
    decoder = load(path, dtype="float32").decoder
    text = torch.from_numpy(make_tokens(30, 1)).long()
    slots = torch.ones(1, dtype=torch.long)
    with torch.inference_mode():
        drafter = model_drafter.ModelDrafter(decoder, decoder.shape.vocab_size, num_slots=1)
        drafter.start(1, 0)
        for part in (range(24), range(24, 30)):
            at = torch.tensor(part)
            entries = Entries(slots, slots.expand(len(at)), at - 1, text[at], None)
            found = drafter._logits(drafter.feed(entries).x)
        expected = model(text[None]).logits[0, 24:]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


# ---- replies -------------------------------------------------------------------------------------


def make_replies(client: Client, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each starts while others run; every second one is sampled."""
    replies = []
    for number, prompt in enumerate(prompts):
        params = {"temperature": 1.0, "seed": number} if number % 2 else {}
        replies.append(client.submit(prompt, max_tokens=17 + 4 * number, **params))
        client.step(3)
    client.run()
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_replies_are_those_without_drafts_cold_and_warm(overlap: bool) -> None:
    """Joining each other, at every depth, and restored from what was captured with drafts."""
    name = f"{TORCH}llama_windows{DRAFTED_BY}llama_windows"
    prompts = prompts_of(name)[:3]
    expected = make_replies(make_client(f"{TORCH}llama_windows", overlap=overlap), prompts)
    chosen = speculation(lambda number: number % (MAX_DEPTH + 1))
    client = make_client(name, overlap=overlap, speculation=chosen)
    assert make_replies(client, prompts) == expected
    assert make_replies(client, prompts) == expected
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 60
    assert metrics.accepted_tokens == metrics.drafted_tokens


@pytest.mark.parametrize("draft", ["llama_small_vocab", "llama_large_vocab"])
def test_replies_are_those_without_another_models_drafts(draft: str) -> None:
    name = f"{TORCH}qwen3_5{DRAFTED_BY}{draft}"
    prompts = prompts_of(name)[:2]
    expected = make_replies(make_client(f"{TORCH}qwen3_5"), prompts)
    client = make_client(name, speculation=speculation(lambda _: 3))
    assert make_replies(client, prompts) == expected
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 60
    assert metrics.accepted_tokens < 0.3 * metrics.drafted_tokens


# ---- what it takes -------------------------------------------------------------------------------


def test_its_weights_and_what_it_remembers_are_in_the_budget() -> None:
    budget = 64 << 20
    without = make_torch_backend("qwen3", num_slots=NUM_SLOTS, max_depth=MAX_DEPTH)
    backend = make_backend("llama")
    ring = backend.runner._drafts._drafter.ring  # type: ignore[union-attr]
    held = sum(tensor[1:].nbytes for tensor in (*ring.kv, ring.tags))
    draft = load(checkpoint("llama"), dtype="float32").decoder
    added = without.limit_memory(budget) - backend.limit_memory(budget)
    assert 0 < 0.9 * (held + draft.nbytes) <= added
    assert backend.memory_parts()["weights"] == without.memory_parts()["weights"] + draft.nbytes


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_5", "recurrent states"), ("deepseek_v3_dense", "latent attention")]
)
def test_a_draft_model_without_plain_attention_is_refused(name: str, kind: str) -> None:
    path = path_of(name)
    with pytest.raises(LoadError, match=f"draft_model: {path.name} is a .* with {kind}"):
        load(checkpoint("qwen3"), draft=path)


def test_it_is_loaded_where_drafts_are_wanted_alone() -> None:
    def of(**kwargs: Any) -> int:
        path, draft = checkpoint("qwen3"), checkpoint("llama")
        backend = TorchBackend.load(path, num_slots=2, dtype="float32", draft=draft, **kwargs)
        backend.close()
        return backend.drafts_itself

    assert of(max_depth=3) == 3
    assert of() == of(max_depth=3, deterministic=True) == 0
