"""The tokenizer and what the checkpoint's files say, against transformers."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from bundled import BUNDLED_PATH
from pippin.errors import LoadError
from pippin.text.bundle import SamplingDefaults, TextBundle
from pippin.text.tokenizer import Tokenizer, spell_byte_level

TEXT = "Once upon a time, 😀 naïve 漢字\n\n  <|im_start|>x<|im_end|> <think>"


def test_encoding_and_decoding_equal_transformers() -> None:
    ours = Tokenizer.load(BUNDLED_PATH)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(BUNDLED_PATH / "tokenizer.json"))
    ids = theirs.encode(TEXT)
    assert ours.encode(TEXT) == ids
    assert ours.decode(ids) == TEXT.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_the_bundled_models_files_are_read() -> None:
    text = TextBundle.load(BUNDLED_PATH)
    assert text.tokenizer.eos_ids == (2, 0)
    assert text.tokenizer.special_ids == {0, 1, 2, 7}
    assert text.tokenizer.vocab_size == 8192
    assert text.tokenizer.bos_id is None
    assert (text.defaults.temperature, text.defaults.top_p) == (0.7, 0.95)
    assert text.chat is not None


def test_every_token_is_spelled_as_the_library_spells_it() -> None:
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    backend = Backend.from_file(str(BUNDLED_PATH / "tokenizer.json"))
    for token in range(backend.get_vocab_size()):
        expected = backend.decode([token], skip_special_tokens=False)
        assert tokenizer.token_text(token) == expected


def test_an_added_token_outside_the_byte_alphabet_is_plain_text() -> None:
    assert spell_byte_level("two words") == b"two words"


def test_ids_past_the_vocabulary_have_no_text() -> None:
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    assert tokenizer.token_bytes(9000) == b""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"eos_token_id": 5}}, (5,)),
        ({"config.json": {"text_config": {"eos_token_id": [6, 7]}}}, (6, 7)),
        (
            {"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": 5}},
            (3,),
        ),
        (
            {
                "generation_config.json": {"eos_token_id": 0},
                "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}},
            },
            (0, 2),
        ),
    ],
)
def test_end_tokens_come_from_the_first_config_and_the_tokenizer(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_PATH / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).eos_ids == expected


def test_a_checkpoint_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    alphabet = {chr(code): id for id, code in enumerate(range(0x21, 0x7F))}
    vocab = alphabet | {"Ġ": len(alphabet), "ab": len(alphabet) + 1}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab c", add_special_tokens=False)[0] == vocab["ab"]
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"


def test_a_directory_without_a_tokenizer_is_an_error_at_load(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_its_vocabulary_is_an_error_at_load(tmp_path: Path) -> None:
    """transformers makes one of the special tokens alone, which encodes every text as nothing."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_PATH / name, tmp_path)
    with pytest.raises(LoadError, match=r"has no tokenizer\.json, and no other vocabulary"):
        Tokenizer.load(tmp_path)
    whole = (BUNDLED_PATH / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(whole[:5000], encoding="utf-8")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read: EOF"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_left_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = Backend.from_file(str(BUNDLED_PATH / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Hi.")) == "Hi."
    assert tokenizer.decode(tokenizer.encode(TEXT[:40])) == TEXT[:40]


def test_sampling_defaults_follow_the_checkpoint(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.7, "top_k": 20}))
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults(temperature=0.0, top_k=20)
    path.write_text(json.dumps({"top_p": "high"}))
    with pytest.raises(LoadError, match="top_p"):
        SamplingDefaults.load(tmp_path)


@pytest.mark.parametrize("encode", [Tokenizer.encode, Tokenizer.encode_rendered])
def test_other_threads_run_while_a_text_is_encoded(
    encode: Callable[[Tokenizer, str], object],
) -> None:
    """A server's event loop among them: with Python's lock held there is one turn, or two."""
    tokenizer, turns = Tokenizer.load(BUNDLED_PATH), 0
    thread = threading.Thread(target=encode, args=(tokenizer, "a fox and a crow " * 15_000))
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        turns += 1
    assert turns > 8
