"""The real tokenizer and template of Qwen3.5, unpacked once for all tests of a process."""

from __future__ import annotations

import json
import lzma
import tempfile
from functools import cache
from pathlib import Path

from pippin.text.bundle import TextBundle

FIXTURE = Path(__file__).parent / "fixtures/qwen3.5"
END_OF_TURN = 248046  # <|im_end|>


def unpack(directory: Path) -> Path:
    """A model directory with its files about text."""
    packed = (FIXTURE / "tokenizer.json.xz").read_bytes()
    (directory / "tokenizer.json").write_bytes(lzma.decompress(packed))
    template = (FIXTURE / "chat_template.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@cache
def load_qwen35() -> TextBundle:
    with tempfile.TemporaryDirectory() as directory:
        unpack(Path(directory))
        config = {"eos_token_id": END_OF_TURN}
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return TextBundle.load(Path(directory))
