"""`/v1/rerank` and `/v1/score`: by embeddings, and by a reranker as its model card runs it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scripted_engine import MODEL, TEXT, TOKENIZER, Script, ScriptedEngine, fail, hang, serving
from transformers import PreTrainedTokenizerFast

from bundled import BUNDLED_PATH
from cases import cases
from pippin.api.endpoints.embeddings import PAIRS, parse_score, whole_score
from pippin.api.model_info import RequestRules
from pippin.api.served_models import ModelLease, ServedText
from pippin.config import LimitsConfig
from pippin.messages import Submit, TokenDelta
from pippin.scheduler.loop import Loop
from pippin.scheduler.request import Limits
from pippin.scheduler.scheduler import Scheduler
from pippin.text.bundle import DEFAULT_INSTRUCTION, Reranker, TextBundle
from pippin.types import TokenLogprobs
from processes import is_installed
from qwen35 import load_qwen35, unpack

DOCUMENTS = ["a fox", "two hens and a fox", "a"]
YES, NO = 100, 101
RERANKER = replace(TEXT, reranker=Reranker(YES, NO))
ODD_TEXTS = ["", "a fox", " two  hens.\n", "\n\nlast", "狐", "\u0301e", ":x", "<|im_end|>"]


def vector_of(tokens: list[int]) -> np.ndarray:
    return np.array([len(tokens), tokens[0], tokens[-1], 1.0], dtype=np.float32)


def embed(submit: Submit) -> list[TokenDelta]:
    return [
        TokenDelta(
            submit.id,
            embedding=vector_of(submit.token_ids).tobytes(),
            finish="stop",
        )
    ]


def cosine(one: str, other: str) -> float:
    a, b = (vector_of(TOKENIZER.encode(text)) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def judge(*, shown: bool) -> Script:
    """Says yes with the log probability -1/length and no with -1; `shown`: among the likeliest."""

    def script(submit: Submit) -> list[TokenDelta]:
        (answer,) = submit.params.logit_bias
        logprob = -1 / submit.prompt_len if answer == YES else -1.0
        top = ((NO,), (-1.0,)) if shown else ((5,), (-0.5,))
        logprobs = [TokenLogprobs(logprob, *top)]
        return [TokenDelta(submit.id, tokens=[answer], logprobs=logprobs, finish="length")]

    return script


def post(path: str, *scripts: Script, text: TextBundle = TEXT, **fields: Any) -> httpx.Response:
    with serving(ScriptedEngine(*(scripts or (embed,))), text=text) as url:
        return httpx.post(url + path, json=fields)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked_by_the_cosine_of_their_embeddings(path: str) -> None:
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    reply = post(path, model="gpt-4o", query="a hen", documents=given).json()
    expected = [cosine("a hen", document) for document in DOCUMENTS]
    results = reply["results"]
    assert [r["index"] for r in results] == sorted(range(3), key=lambda i: -expected[i])
    for result in results:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], rel=1e-5)
    assert reply["model"] == "stories"
    num_tokens = sum(len(TOKENIZER.encode(text)) for text in ["a hen", *DOCUMENTS])
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_the_best_are_returned_without_their_texts_if_so_asked() -> None:
    asked = {"query": "a hen", "documents": DOCUMENTS, "return_documents": False}
    ranked = post("/v1/rerank", **asked).json()["results"]
    assert [result.keys() for result in ranked] == [{"index", "relevance_score"}] * 3
    assert post("/v1/rerank", **asked, top_n=1).json()["results"] == ranked[:1]
    assert post("/v1/rerank", **asked, top_n=0).json()["results"] == ranked


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_are_scored_in_order_one_with_many_or_each_with_its_own(path: str) -> None:
    one = post(path, text_1="a hen", text_2=DOCUMENTS).json()
    assert one["object"] == "list"
    assert [item["index"] for item in one["data"]] == [0, 1, 2]
    assert {item["object"] for item in one["data"]} == {"score"}
    assert [item["score"] for item in one["data"]] == pytest.approx(
        [cosine("a hen", document) for document in DOCUMENTS], rel=1e-5
    )
    each = post(path, text_1=DOCUMENTS, text_2=DOCUMENTS[::-1]).json()["data"]
    assert [item["score"] for item in each] == pytest.approx(
        [cosine(*pair) for pair in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)], rel=1e-5
    )


@pytest.mark.parametrize("shown", [True, False])
def test_a_reranker_scores_by_yes_against_no(shown: bool) -> None:
    engine = ScriptedEngine(judge(shown=shown))
    with serving(engine, text=RERANKER) as url:
        asked = {"query": "a hen", "documents": DOCUMENTS, "instruction": "Find it."}
        reply = httpx.post(f"{url}/v1/rerank", json=asked).json()
    assert len(engine.submits) == (3 if shown else 6)
    prompts = {tuple(submit.token_ids) for submit in engine.submits}
    assert len(prompts) == 3
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert all("Find it." in TOKENIZER.decode(list(prompt)) for prompt in prompts)
    by_index = {r["index"]: r["relevance_score"] for r in reply["results"]}
    for index, document in enumerate(DOCUMENTS):
        (prompt,) = [
            p for p in prompts if f"<Document>: {document}<" in TOKENIZER.decode_with_special(p)
        ]
        yes, no = np.exp(-1 / len(prompt)), np.exp(-1.0)
        assert by_index[index] == pytest.approx(yes / (yes + no), rel=1e-6)


@cases(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a"] * 513}, "documents"),
        ("/v1/rerank", {"documents": [{"title": "a"}]}, "documents"),
        ("/v1/rerank", {"documents": ["word " * 9_000]}, "documents"),
        ("/v1/rerank", {"query": "word " * 9_000}, "query"),
        ("/v1/rerank", {"top_n": -1}, "top_n"),
        ("/v1/rerank", {"model": "gpt-4"}, "model"),
        ("/v1/rerank", {"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/v1/rerank", {"documents": ["a" * 999_999], "max_tokens_per_doc": 1}, "documents"),
        ("/v1/rerank", {"query": {"image": "a"}}, "query"),
        ("/v1/rerank", {"instruction": "Find it."}, "instruction"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_2": [[5]]}, "text_2"),
        ("/v1/score", {"text_2": None}, "text_1"),
        ("/v1/score", {"queries": "a"}, "queries"),
        ("/v1/score", {"text_1": None, "documents": "a"}, "documents"),
        ("/v1/score", {"text_1": None, "text_2": None}, "queries"),
    ],
)
def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    base: dict[str, Any] = {"query": "a", "documents": ["b"]}
    if path == "/v1/score":
        base = {"text_1": "a", "text_2": "b"}
    response = post(path, **base | fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("text", [TEXT, RERANKER])
def test_if_one_fails_the_others_are_stopped(text: TextBundle) -> None:
    engine = ScriptedEngine(hang(), fail("full"))
    with serving(engine, text=text) as url:
        asked = {"text_1": ["a", "b"], "text_2": ["c", "d"]}
        response = httpx.post(f"{url}/v1/score", json=asked)
    assert response.status_code == 503
    assert engine.aborted


def card_prompt(query: str, document: str, tokenizer: Any) -> list[int]:
    """As the model card of Qwen3-Reranker makes it."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    parts = (tokenizer.encode(part, add_special_tokens=False) for part in (prefix, pair, suffix))
    return [token for part in parts for token in part]


def test_the_prompt_is_that_of_the_model_card(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(unpack(tmp_path))
    ours, reranker = load_qwen35().tokenizer, Reranker(YES, NO)
    for query in ODD_TEXTS:
        for document in ODD_TEXTS:
            head = reranker.head(query, DEFAULT_INSTRUCTION, ours)
            assert head + reranker.tail(document, ours) == card_prompt(query, document, theirs)


@pytest.mark.parametrize(
    ("name", "config", "ids", "found"),
    [
        ("Qwen3-Reranker-0.6B", {}, None, True),
        ("models--Qwen--Qwen3-Reranker-0.6B/snapshots/abc", {}, None, True),
        ("tiny", {"classifier_from_token": ["no", "yes"]}, None, True),
        ("tiny", {}, {"true_token_id": YES, "false_token_id": NO}, True),
        ("tiny", {"classifier_from_token": ["Yes"]}, None, False),
        ("Qwen3-0.6B", {}, None, False),
        ("Qwen3-Reranker-seq", {"architectures": ["Qwen3ForSequenceClassification"]}, None, False),
    ],
)
def test_rerankers_are_detected_from_their_checkpoints(
    tmp_path: Path, name: str, config: dict[str, Any], ids: dict[str, int] | None, found: bool
) -> None:
    directory = tmp_path / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if ids is not None:
        (directory / "1_LogitScore").mkdir()
        (directory / "1_LogitScore/config.json").write_text(json.dumps(ids))
    reranker = Reranker.detect(directory, TOKENIZER)
    assert (reranker is not None) == found
    if reranker is not None and ids is not None:
        assert reranker == Reranker(YES, NO)
    elif reranker is not None:
        words = [TOKENIZER.token_text(id) for id in (reranker.yes_id, reranker.no_id)]
        assert words == ["yes", "no"]


class LoopEngine:
    """A real loop, stepped by the request that waits."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._deltas: dict[str, list[TokenDelta]] = {}

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        self._loop.submit(submit)
        waiting = self._deltas[submit.id] = []
        while True:
            await asyncio.sleep(0)
            for delta in self._loop.step():
                self._deltas[delta.id].append(delta)
            while waiting:
                yield waiting.pop(0)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_a_rerankers_scores_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    import torch_families
    from pippin.backends.torch.backend import TorchBackend
    from pippin.backends.torch.load import load

    directory = tmp_path / "Qwen3-Reranker-tiny"
    directory.mkdir()
    config = torch_families.TORCH_CONFIGS["qwen3"] | {"vocab_size": MODEL.vocab_size}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(torch_families.weights(config), directory / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_PATH / name, directory / name)
    text = TextBundle.load(directory)
    assert text.reranker is not None
    backend = TorchBackend(load(directory, dtype="float32"), num_slots=4, pool_bytes=50_000_000)
    loop = Loop(Scheduler(backend, Limits(max_running=4)), backend)
    rules = RequestRules(MODEL, text.defaults, LimitsConfig())
    lease = ModelLease(LoopEngine(loop), ServedText(text, rules))  # type: ignore[arg-type]
    job = parse_score({"text_1": "a hen", "text_2": DOCUMENTS}, lease.served)
    reply = asyncio.run(whole_score(job, lease))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    for item, document in zip(reply["data"], DOCUMENTS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([card_prompt("a hen", document, tokenizer)])).logits[0, -1]
        expected = torch.log_softmax(logits[[no, yes]], dim=0)[1].exp().item()
        assert item["score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("names", PAIRS)
def test_vllms_newer_names_of_pairs_mean_the_same(names: tuple[str, str]) -> None:
    reply = post("/v1/score", **{names[0]: "a hen", names[1]: DOCUMENTS})
    scores = [each["score"] for each in reply.json()["data"]]
    assert scores == pytest.approx([cosine("a hen", each) for each in DOCUMENTS], rel=1e-5)


COHERE_V1 = {
    "model": "stories",
    "query": "a hen",
    "documents": [{"text": document} for document in DOCUMENTS],
    "rank_fields": ["text"],
    "top_n": 2,
    "return_documents": False,
    "max_chunks_per_doc": 10,
}
COHERE_V2 = {"model": "stories", "query": "a hen", "documents": DOCUMENTS, "top_n": 2}
JINA = {
    "model": "stories",
    "query": {"text": "a hen"},
    "documents": DOCUMENTS,
    "top_n": 2,
    "return_documents": True,
}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/rerank", COHERE_V1), ("/v2/rerank", COHERE_V2), ("/rerank", JINA)]
)
def test_coheres_and_jinas_requests_are_answered_in_their_form(
    path: str, body: dict[str, Any]
) -> None:
    reply = post(path, **body)
    found = reply.json()
    expected = sorted(range(3), key=lambda i: -cosine("a hen", DOCUMENTS[i]))
    assert [result["index"] for result in found["results"]] == expected[:2]
    assert ("document" in found["results"][0]) == body.get("return_documents", True)
    assert found["object"] == "list"  # Jina's
    assert found["usage"]["total_tokens"] == found["meta"]["tokens"]["input_tokens"] > 0
    assert reply.headers.get("x-pippin-ignored", "") in ("", "max_chunks_per_doc")


def test_one_document_may_be_a_string() -> None:
    assert len(post("/rerank", query="a", documents="b").json()["results"]) == 1


def test_queries_and_documents_are_read_up_to_a_number_of_tokens() -> None:
    engine = ScriptedEngine(embed)
    with serving(engine) as url:
        body = {"query": "a fox and two hens", "documents": ["two hens and a fox", "a"]}
        limits = {"max_tokens_per_query": 1, "max_tokens_per_doc": 2}
        reply = httpx.post(f"{url}/rerank", json=body | limits)
    read = [submit.token_ids for submit in engine.submits]
    assert read == [
        TOKENIZER.encode("a fox and two hens")[:1],
        TOKENIZER.encode("two hens and a fox")[:2],
        TOKENIZER.encode("a"),
    ]
    shown = {result["document"]["text"] for result in reply.json()["results"]}
    assert shown == set(body["documents"])  # whole
