"""What is compiled, what is refused and why, and what a grammar lets a reply say."""

from __future__ import annotations

import itertools
import json
import re
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, trainers

from bundled import BUNDLED_PATH
from cases import cases
from decode.walks import VOCAB, CountingProver, bundled_vocabulary, walk
from pippin.backends.masks import allow_only, allowed_ids, full_masks, num_words, pack
from pippin.decode import compile
from pippin.decode.compile import (
    REMEMBERED_GRAMMARS,
    REMEMBERED_GROWTH,
    CompiledGrammar,
    GrammarCompiler,
    Growth,
    Vocabulary,
    compile_grammar,
)
from pippin.engine.grammar_zygote import vocabulary_of
from pippin.errors import RequestError, UnsupportedField
from pippin.text.tokenizer import Tokenizer
from pippin.types import GrammarSpec

OBJECT = {"type": "object"}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return bundled_vocabulary()


def schema(text: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", text if isinstance(text, str) else json.dumps(text))


def allowed(grammar: CompiledGrammar, vocabulary: Vocabulary) -> set[bytes]:
    mask = np.zeros(num_words(len(vocabulary.tokens)), dtype=np.int32)
    grammar.fill_mask(mask)
    ids = allowed_ids(mask, len(vocabulary.tokens)).tolist()
    return {b"END" if id in vocabulary.special_token_ids else vocabulary.tokens[id] for id in ids}


def said(tokens: list[int], vocabulary: Vocabulary) -> str:
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()


# ---- what is refused -------------------------------------------------------------------------


@cases(
    ("given", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list; it must be an object"),
        ("true", "is a boolean"),
        ({"if": OBJECT, "then": OBJECT}, "the keyword if is not supported"),
        ({"$ref": "#/$defs/a", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"type": "string", "maxLenght": 3}, "did you mean maxLength?"),
        ({"properties": {"a": {"$defs": {"b": {"nott": 1}}}}}, "$.properties.a.$defs.b: nott"),
        ({"anyOf": [{"type": "null"}, {"items": {"item": 1}}]}, "$.anyOf[1].items: item"),
        ({"x-guidance": {"lenient": True}, "type": "object"}, "x-guidance"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "color"}, "format: color"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"type": "strin"}, "strin"),
        ({"const": 2**53 + 1}, "const holds 9007199254740993"),
        ({"enum": [{"a": [-(2**63)]}]}, "enum holds -9223372036854775808"),
        ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf is 1000003"),
        ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties is 3"),
        ({"$ref": "#"}, "json_schema: "),  # no reply is ever whole
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(
    given: Any, words: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        compile_grammar(schema(given), vocabulary)
    assert (caught.value.status, caught.value.param) == (400, "json_schema")


@cases(
    ("spec", "words"),
    [
        (GrammarSpec("regex", "(a"), "unclosed group"),
        (GrammarSpec("regex", r"\bword\b"), "lookarounds"),
        (GrammarSpec("ebnf", 'rot ::= "a"'), "root"),
        (GrammarSpec("ebnf", "root ::= nowhere"), "nowhere"),
        (GrammarSpec("ebnf", "root ::= ("), "Expected"),
        (GrammarSpec("ebnf", "start: nowhere"), "nowhere"),
        (GrammarSpec("ebnf", "root ::= " + "(" * 50_000), "recursion"),
        (GrammarSpec("ebnf", "start: start"), "ebnf: no reply can match it"),
        (GrammarSpec("regex", r"[^\s\S]"), "regex: no reply can match it"),
        (GrammarSpec("json_schema", '{"$ref": "#"}'), "json_schema: no reply can match it"),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, GrammarSpec) else "",
)
def test_what_is_no_grammar_is_refused_in_words(
    spec: GrammarSpec, words: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        compile_grammar(spec, vocabulary)
    assert caught.value.param == spec.kind


# ---- what a reply may say --------------------------------------------------------------------


@cases("seed", range(8))
@cases(
    "pattern",
    ["[a-z]+ (cat|dog)", "^[0-9]{3}-[0-9]{4}$", "(yes|no)", r"\d{1,3}(\.\d{1,3}){3}", "[^a]{0,9}"],
)
def test_replies_match_their_regex(pattern: str, seed: int, vocabulary: Vocabulary) -> None:
    grammar = compile_grammar(GrammarSpec("regex", pattern), vocabulary)
    tokens, finished = walk(grammar, vocabulary, seed, free=10)
    assert not finished or re.fullmatch(pattern, said(tokens, vocabulary))


@pytest.mark.parametrize(
    "text",
    [
        'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
        'start: expr\nexpr: term ("+" term)*\nterm: /[0-9]+/ | "(" expr ")"',
    ],
    ids=["GBNF", "Lark"],
)
def test_ebnf_is_gbnf_or_lark(text: str, vocabulary: Vocabulary) -> None:
    compiled = compile_grammar(GrammarSpec("ebnf", text), vocabulary)
    for seed in range(8):
        tokens, finished = walk(compiled.copy(), vocabulary, seed, free=8)
        reply = said(tokens, vocabulary)
        assert set(reply) <= set("0123456789+()")
        assert not finished or isinstance(eval(re.sub(r"\b0+(?=\d)", "", reply)), int)


def test_a_reply_is_finished_when_nothing_can_follow(vocabulary: Vocabulary) -> None:
    grammar = compile_grammar(GrammarSpec("regex", "ab?"), vocabulary)
    grammar.advance([vocabulary.tokens.index(b"a")])
    assert not grammar.finished
    assert allowed(grammar, vocabulary) == {b"b", b"END"}
    grammar.advance([vocabulary.tokens.index(b"b")])
    assert grammar.finished


def test_a_token_that_is_not_allowed_is_an_error(vocabulary: Vocabulary) -> None:
    grammar = compile_grammar(GrammarSpec("regex", "a+"), vocabulary)
    with pytest.raises(RuntimeError, match="doesn't satisfy the grammar"):
        grammar.advance([vocabulary.tokens.index(b"b")])


@pytest.mark.slow
def test_a_grammar_that_grows_too_large_for_its_library_is_an_error(
    vocabulary: Vocabulary,
) -> None:
    grammar = compile_grammar(GrammarSpec("regex", "(a{1000}){1000}{1000}"), vocabulary)
    with pytest.raises(RequestError, match=r"the grammar is too complex: .*too many"):
        walk(grammar, vocabulary, 0, most=5000)


def test_copies_go_their_own_ways(vocabulary: Vocabulary) -> None:
    compiled = compile_grammar(GrammarSpec("regex", "ax|by"), vocabulary)
    a, b = compiled.copy(), compiled.copy()
    a.advance([vocabulary.tokens.index(b"a")])
    b.advance([vocabulary.tokens.index(b"b")])
    assert (allowed(a, vocabulary), allowed(b, vocabulary)) == ({b"x"}, {b"y"})


def test_what_is_forced_is_spelled_as_the_model_spells_it(vocabulary: Vocabulary) -> None:
    properties = {"first_name": {"type": "boolean"}, "z": {"type": "null"}}
    spec = schema({**OBJECT, "properties": properties, "required": ["first_name", "z"],
                   "additionalProperties": False})  # fmt: skip
    grammar = compile_grammar(spec, vocabulary)
    forced = grammar.forced()
    whole = Tokenizer.load(BUNDLED_PATH).encode('{"first_name": true', add_special_tokens=False)
    assert len(forced) > 3
    assert forced == whole[: len(forced)]
    grammar.advance(forced)


# ---- vocabularies ----------------------------------------------------------------------------


def test_marks_are_no_text(vocabulary: Vocabulary) -> None:
    """Added tokens come only by name; what spells the same with other tokens is text."""
    everything = compile_grammar(GrammarSpec("regex", r"(.|\n)*"), vocabulary)
    mask = np.zeros(num_words(VOCAB), dtype=np.int32)
    everything.fill_mask(mask)
    ids = set(allowed_ids(mask, VOCAB).tolist())
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    assert ids & tokenizer.added_ids == set(tokenizer.eos_ids)
    think = tokenizer.encode("<think>", add_special_tokens=False)
    assert len(think) == 1
    spelled = compile_grammar(GrammarSpec("regex", "<think>"), vocabulary)
    tokens, finished = walk(spelled, vocabulary, 0)
    assert (said(tokens, vocabulary), finished) == ("<think>", True)
    assert think[0] not in tokens
    named = compile_grammar(GrammarSpec("ebnf", 'start: <think> "a"'), vocabulary)
    mask[:] = 0
    named.fill_mask(mask)
    assert allowed_ids(mask, VOCAB).tolist() == think


def test_ids_past_the_tokenizer_are_never_allowed() -> None:
    vocabulary = vocabulary_of(Tokenizer.load(BUNDLED_PATH), VOCAB + 70)
    grammar = compile_grammar(GrammarSpec("regex", r"(.|\n)*"), vocabulary)
    mask = np.zeros(num_words(VOCAB + 70), dtype=np.int32)
    grammar.fill_mask(mask)
    assert allowed_ids(mask, VOCAB + 70).max() < VOCAB


def sentencepiece() -> Tokenizer:
    """As Llama 2's: a space before the first word, and bytes for what it has no piece of."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = ["<unk>", "<s>", "</s>"]
    corpus = ['{"name": "Bob", "age": 3} the cat and the dog'] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    )
    backend.train_from_iterator(corpus, trainer)
    return Tokenizer(backend, eos_ids=(2,), special_ids=frozenset({0, 1, 2}))


def test_sentencepiece_replies_are_text_too() -> None:
    tokenizer = sentencepiece()
    tokenizer._backend.add_special_tokens([])
    vocabulary = Vocabulary(
        [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)],
        eos_ids=(2,),
        marks=(0, 1),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    forced = compile_grammar(GrammarSpec("regex", '[{]"name": "Bob"[}]'), vocabulary).forced()
    assert said(forced, vocabulary).startswith('{"name": ')
    spec = schema({**OBJECT, "properties": {"name": {"enum": ["Bob", "naïve 日本"]}},
                   "required": ["name"], "additionalProperties": False})  # fmt: skip
    for seed in range(5):
        tokens, finished = walk(compile_grammar(spec, vocabulary), vocabulary, seed)
        assert finished
        assert json.loads(said(tokens, vocabulary))["name"] in ("Bob", "naïve 日本")


def test_a_tokenizer_that_does_not_spell_bytes_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with pytest.raises(UnsupportedField, match="not runs of bytes"):
        vocabulary_of(Tokenizer(backend, eos_ids=(1,)), 2)
    with pytest.raises(UnsupportedField, match="no end token"):
        vocabulary_of(Tokenizer(sentencepiece()._backend), 300)


# ---- packed masks ----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 8192])
def test_masks_are_packed_and_unpacked(vocab_size: int) -> None:
    chosen = np.random.default_rng(vocab_size).random(vocab_size) < 0.5
    packed = pack(chosen)
    assert packed.shape == (num_words(vocab_size),)
    np.testing.assert_array_equal(allowed_ids(packed, vocab_size), np.flatnonzero(chosen))
    masks = full_masks(2, vocab_size)
    assert len(allowed_ids(masks[0], vocab_size)) == vocab_size
    allow_only(masks[1], vocab_size - 1)
    assert allowed_ids(masks[1], vocab_size).tolist() == [vocab_size - 1]
    assert len(allowed_ids(masks[0], vocab_size)) == vocab_size


# ---- the compiler ----------------------------------------------------------------------------


def test_a_reply_whose_grammar_takes_too_much_time_ends(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    """An ambiguous grammar takes longer with every token."""
    steps = itertools.count(0, 0.25)  # seconds: a mask takes one
    monkeypatch.setattr(compile, "thread_time", lambda: next(steps))
    grammar = compile_grammar(GrammarSpec("ebnf", 'start: s\ns: s s | "a" |\n'), vocabulary)
    (letter,) = [n for n, token in enumerate(vocabulary.tokens) if token == b"a"]
    monkeypatch.setattr(compile, "MAX_SLOW_SECONDS", 99.0)
    mask = full_masks(1, len(vocabulary.tokens))[0]
    replies = [grammar.copy(), grammar.copy()]  # each has an allowance of its own
    for reply in replies:
        for _ in range(4):
            reply.advance([letter])
            reply.fill_mask(mask)
        reply.advance([letter])
        with pytest.raises(RequestError, match=r"5 tokens took 1\.2 s .* is 1 s and 2 ms a token"):
            reply.fill_mask(mask)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("ebnf", 'start: s\ns: s s | "a" |\n'),
        schema({"type": "object", "properties": {"a": {"enum": ["b", "bcd"]}}, "required": ["a"]}),
    ],
    ids=["ambiguous", "json"],
)
def test_a_grammar_that_has_become_slow_allows_the_same(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary, spec: GrammarSpec
) -> None:
    monkeypatch.setattr(compile, "MAX_SLOW_SECONDS", 99.0)
    fast = compile_grammar(spec, vocabulary)
    slow = CompiledGrammar(fast._matcher.deep_copy(), vocabulary.tokenizer, Growth(100.0))
    end = vocabulary.special_token_ids
    with pytest.raises(RuntimeError, match="satisfy"):
        CompiledGrammar(slow._matcher.deep_copy(), vocabulary.tokenizer, slow.growth).advance(
            [len(vocabulary.tokens) - 1]
        )
    masks = full_masks(2, len(vocabulary.tokens))
    for _ in range(12):
        for grammar, mask in zip((fast, slow), masks, strict=True):
            grammar.fill_mask(mask)
        assert (masks[0] == masks[1]).all()
        assert (fast.forced(), fast.finished) == (slow.forced(), slow.finished)
        if fast.finished:
            break
        ids = allowed_ids(masks[0], len(vocabulary.tokens)).tolist()
        tokens = fast.forced() or [id for id in ids if id not in end][:1]
        fast.advance(tokens)
        slow.advance(tokens)
    assert (fast.slow, slow.slow) == (False, True)


def splits(length: int) -> GrammarSpec:
    """After a choice one text is forced, which the grammar splits in every way."""
    rules = [
        f"s{n}: " + " | ".join(f"s{k} s{n - k}" for k in range(1, n)) for n in range(2, length + 1)
    ]
    text = "\n".join([f'start: ("x" | "y") "-" s{length}', 's1: "a"', *rules])
    return GrammarSpec("ebnf", text)


def test_a_large_grammar_is_followed_by_threads_and_a_small_one_within_fewer_items(
    vocabulary: Vocabulary,
) -> None:
    (choice,) = [n for n, token in enumerate(vocabulary.tokens) if token == b"x"]
    assert compile_grammar(splits(100), vocabulary).slow
    small = compile_grammar(splits(30), vocabulary)
    assert not small.slow
    small.advance([choice])
    with pytest.raises(RequestError, match=r"Too many items .limit 10000"):
        small.advance(small.forced())


def test_copies_of_a_grammar_are_slow_together(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    steps = itertools.count(0, 0.02)
    monkeypatch.setattr(compile, "thread_time", lambda: next(steps))
    grammar = compile_grammar(GrammarSpec("regex", "a+"), vocabulary)
    replies = [grammar.copy(), grammar.copy()]
    for _ in range(2):
        assert not any(reply.slow for reply in replies)
        allowed(replies[0], vocabulary)
    assert all(reply.slow for reply in [*replies, grammar.copy()])


def test_a_grammar_is_compiled_once_and_forgotten_last_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def note(spec: GrammarSpec, _: Vocabulary) -> Any:
        compiled.append(spec.text)
        return SimpleNamespace(growth=Growth())

    monkeypatch.setattr(compile, "compile_grammar", note)
    compiler = GrammarCompiler(bundled_vocabulary, CountingProver())

    def ask(number: int) -> Future[CompiledGrammar]:
        future = compiler.compile(GrammarSpec("regex", f"a{number}"))
        future.result()
        return future

    assert ask(0) is ask(0)
    for number in range(REMEMBERED_GRAMMARS):
        ask(number)
    ask(0)
    ask(REMEMBERED_GRAMMARS)  # pushes 1 out, not 0
    assert len(compiled) == REMEMBERED_GRAMMARS + 1
    ask(0)
    assert len(compiled) == REMEMBERED_GRAMMARS + 1
    ask(1)
    assert compiled[-1] == "a1"
    compiler.close()


def test_grammars_that_have_grown_in_replies_are_forgotten() -> None:
    compiler = GrammarCompiler(bundled_vocabulary, CountingProver())
    specs = [GrammarSpec("regex", text) for text in ("a", "b", "c")]
    grammars = [compiler.compile(spec).result() for spec in specs]
    for grammar in grammars[:2]:
        grammar.copy().growth.seconds = REMEMBERED_GROWTH
    compiler.trim()  # as the scheduler does when a reply ends
    again = [compiler.compile(spec).result() for spec in reversed(specs)]
    assert [new is old for new, old in zip(again, reversed(grammars), strict=True)] == [
        *(True, True, False),
    ]
    compiler.close()


def test_grammars_are_compiled_beside_the_callers_thread() -> None:
    go_on = threading.Event()
    threads: list[str] = []

    def load() -> Vocabulary:
        threads.append(threading.current_thread().name)
        go_on.wait(60)
        return bundled_vocabulary()

    compiler = GrammarCompiler(load, CountingProver())
    future = compiler.compile(GrammarSpec("regex", "a"))
    assert not future.done()
    go_on.set()
    assert not future.result().finished
    assert threads[0] != threading.current_thread().name
    compiler.close()


def test_whoever_asks_is_told_that_there_can_be_no_grammars() -> None:
    def load() -> Vocabulary:
        raise UnsupportedField("not with this tokenizer")

    compiler = GrammarCompiler(load, CountingProver())
    compiler.load()
    future = compiler.compile(GrammarSpec("regex", "a"))
    with pytest.raises(UnsupportedField, match="not with this tokenizer"):
        future.result()
    compiler.close()
