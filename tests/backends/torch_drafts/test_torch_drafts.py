"""Drafts on torch: of the checkpoint's MTP head and of a draft model; sizes that are warmed up.

Transformers drops the head's weights, so one of its decoder layers is given them by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch
from safetensors.torch import load_file

from builders import Client
from bundled import BUNDLED_PATH
from pippin.backends.base import DecodeRow, PrefillRow, Retire
from pippin.backends.sampling.noise import noise_keys, stream_of
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.drafts import drafters as step_drafters
from pippin.backends.torch.drafts.drafters import Entries
from pippin.backends.torch.forwards import Forwards
from pippin.backends.torch.load import load
from pippin.backends.torch.step.sampler import add_gumbel_noise
from pippin.backends.torch.step.words import StepSize
from pippin.backends.warm_up import WarmUp
from pippin.errors import LoadError
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import DeviceDrafter, Drafter, Speculation
from reference import BUNDLED
from serving import DRAFTED_BY, TORCH, make_client, make_prompt
from test_contract import Steps, admit, make_tokens, restore
from test_draft_contract import MAX_DEPTH, NUM_SLOTS, OWN_DRAFTS, Reply, started
from torch_families import checkpoint
from torch_serving import load_torch, make_torch_backend, path_of
from transformers_families import written_model

NAMES = ("qwen3_5_mtp", "qwen3_next_mtp")


SAMPLED = {"temperature": 1.0, "seed": 5}


def make_mtp_backend(name: str, **kwargs: Any) -> TorchBackend:
    options = {"num_slots": NUM_SLOTS, "max_depth": MAX_DEPTH, "mtp": True} | kwargs
    return make_torch_backend(name, **options)


def drafts_of(steps: Steps, slot: int, num_drafts: int = MAX_DEPTH) -> list[int]:
    assert isinstance(steps.backend, TorchBackend)
    found: list[int] = steps.backend._future_map.drafts[slot, :num_drafts].tolist()
    return found


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
    steps, prompt = Steps(make_mtp_backend(name)), make_tokens(24, 3)
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
    monkeypatch.setattr(step_drafters, "HEAD_LENGTH", 8)
    steps, prompt = Steps(make_mtp_backend("qwen3_5_mtp")), make_tokens(30, 4)
    chunk = PrefillRow(1, 0, prompt, samples=True, num_drafts=2)
    text = [*prompt, *steps.run(admit=(admit(1, prompt),), prefill=(chunk,)).tokens[1]]
    for depth in (2, 0, 2, 1):
        assert drafts_of(steps, 1, 2) == reference("qwen3_5_mtp").drafts(text, 2, window=8)
        row = DecodeRow(1, len(text) - 1, depth=depth, num_drafts=2)
        text += steps.run(decode=(row,)).tokens[1]


def test_a_request_sees_nothing_of_the_one_before_in_its_slot() -> None:
    """Nor numbers that are none."""
    found = []
    for poison in (False, True):
        steps = Steps(make_mtp_backend("qwen3_5_mtp"))
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
    steps, prompt = Steps(make_mtp_backend("qwen3_5_mtp")), make_tokens(20, 2)
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
    left = [make_mtp_backend("qwen3_5_mtp", mtp=mtp).limit_memory(budget) for mtp in (False, True)]
    backend = make_mtp_backend("qwen3_5_mtp")
    drafter = backend.runner._drafts._drafter  # type: ignore[union-attr]
    held = sum(tensor[1:].nbytes for tensor in (drafter.ring.kv[0], drafter.ring.tags))
    assert 0 < 0.9 * held < left[0] - left[1]


OWN = f"torch, {OWN_DRAFTS}"


def make_backend(draft: str = "qwen3", **kwargs: Any) -> TorchBackend:
    options = {"num_slots": NUM_SLOTS, "max_depth": MAX_DEPTH} | kwargs
    return make_torch_backend("qwen3", draft=draft, **options)


def test_of_a_long_text_the_end_is_read_and_its_start_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ring of 24 tokens, the first 4 of them kept: drafts of the model over just these."""
    defaults = (step_drafters.run_plain, 24)
    monkeypatch.setattr(step_drafters.ModelDrafter.__init__, "__defaults__", defaults)
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
def draft_reference() -> Any:
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
    return int(draft_reference()(tokens, attention_mask=mask).logits[0, -1].argmax())


def test_a_draft_model_sees_nothing_of_the_request_before_in_its_slot() -> None:
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
    for num_drafts in (4, 4, 0):
        row = after.own_row(num_drafts)
        assert after.settle(steps.run(decode=(row,))) == row.depth
    after.check()


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_draft_model_attends_as_its_family_does(name: str) -> None:
    """With caps, norms, scales, sinks, windows, experts: the logits are those of transformers."""
    model, path = written_model(name)
    decoder = load(path, dtype="float32").decoder
    text = torch.from_numpy(make_tokens(30, 1)).long()
    slots = torch.ones(1, dtype=torch.long)
    with torch.inference_mode():
        drafter = step_drafters.ModelDrafter(decoder, decoder.shape.vocab_size, num_slots=1)
        drafter.start(1, 0)
        for part in (range(24), range(24, 30)):
            at = torch.tensor(part)
            entries = Entries(slots, slots.expand(len(at)), at - 1, text[at], None)
            _, found = drafter._finish(drafter.feed(entries), slots, at, None)
        expected = model(text[None]).logits[0, 24:]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


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


WARMED_DEPTH, WARMED_SLOTS, NUM_REQUESTS = 3, 6, 24


DEVICES = {
    "qwen3_5": None,
    "qwen3_5_mtp": DeviceDrafter("mtp", WARMED_DEPTH),
    f"qwen3{DRAFTED_BY}qwen3": DeviceDrafter("draft", WARMED_DEPTH),
}


class Guesses(Drafter):
    """Tokens at random, which no reply has but by chance."""

    name = "guesses"

    def propose(self, request: Request, num_tokens: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng(request.num_tokens)
        return rng.integers(3, 90, num_tokens).astype(np.int32), 0


@dataclass
class Sizes:
    """Stands for captured steps."""

    prepared: set[StepSize] = field(default_factory=set)
    asked: set[StepSize] = field(default_factory=set)
    folded: set[int] = field(default_factory=set)  # drafts that were kept of a row
    busy: bool = False
    graphs: dict[Any, Any] = field(default_factory=dict)

    def prepare(self, size: StepSize) -> None:
        self.prepared.add(size)

    def can_run(self, size: StepSize) -> bool:
        return True


def noted_sizes(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    sizes = Sizes()

    def replay(self: Forwards, step: Any, steps: Sizes, decodes: Any, size: StepSize) -> None:
        if steps.busy:
            steps.asked.add(size)
        else:
            steps.prepare(size)
        self._launch_rows(step, decodes)

    def fold(self: Forwards, slot: int, end: int) -> None:
        if num_kept := int(self._parts.rows.num_kept[slot]):
            sizes.folded.add(num_kept)
        run_fold(self, slot, end)

    run_fold = Forwards.fold
    monkeypatch.setattr(Forwards, "_replay_verified", replay)
    monkeypatch.setattr(Forwards, "fold", fold)
    backend.runner.forwards.steps = sizes  # type: ignore[assignment]
    backend.runner.forwards.kinds = frozenset({"steps with drafts"})
    ways = replace(backend._ways, kernels=True, draft_kernels=True)
    backend.runner._ways = ways
    backend.shapes_to_warm_up = [shape for shape in ways.shapes_to_warm_up() if shape.num_steps]
    return sizes


def run_requests(client: Client, name: str, random: Random) -> None:
    """They come and go, some beside a prompt, some that cannot have drafts."""
    for number in range(NUM_REQUESTS):
        params: dict[str, Any] = {"max_tokens": random.choice((1, 2, 5, 20, 40))}
        params |= random.choice(({}, {"temperature": 1.0, "seed": number}, {"speculate": False}))
        client.submit(make_prompt(name, random.randrange(3, 40), number), **params)
        client.step(random.randrange(8))
    client.run()


def drafters(name: str) -> Iterator[Drafter | None]:
    if DEVICES[name] is not None:
        yield None
    yield Guesses()


@pytest.mark.parametrize(
    ("name", "drafter"), [(name, drafter) for name in DEVICES for drafter in drafters(name)]
)
def test_steps_of_requests_have_sizes_that_were_warmed_up(
    name: str, drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(0)
    name = f"{TORCH}{name}"
    device = DEVICES[name.removeprefix(TORCH)]
    speculation = Speculation(
        drafter,
        WARMED_DEPTH,
        lambda _: random.choice((0, 0, 1, 2, WARMED_DEPTH)),
        device=device,
    )
    client = make_client(name, num_slots=WARMED_SLOTS, speculation=speculation)
    backend = client.loop.backend
    assert isinstance(backend, TorchBackend)
    sizes = noted_sizes(backend, monkeypatch)
    WarmUp(backend, lambda _: True).run_at_load(lambda _: None)
    assert not sizes.asked
    backend.make_way(busy=True)
    monkeypatch.setattr(backend, "make_way", lambda *, busy: None)
    warmed_up = set(sizes.folded)
    run_requests(client, name, random)
    assert {size.depth for size in sizes.asked} == {0, 1, 2, WARMED_DEPTH}
    assert len({size.num_rows for size in sizes.asked}) > 2
    assert sizes.asked <= sizes.prepared
    assert sizes.folded <= warmed_up
    assert sizes.folded


def test_steps_that_are_too_wide_for_drafts_are_captured_for_rows_that_had_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TorchBackend(load_torch("qwen3_5"), num_slots=200, max_depth=WARMED_DEPTH)
    sizes = noted_sizes(backend, monkeypatch)
    backend.runner.capture_largest()
    assert {size.num_rows for size in sizes.prepared if size.span and not size.depth} == {192, 256}
    assert max(shape.num_rows for shape in backend.shapes_to_warm_up if shape.depth) == 128
