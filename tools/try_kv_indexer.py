"""Whether Dynamo's KV indexer, fed by our KV events, predicts `cached_tokens`.

    python tools/try_kv_indexer.py                       1,000 prompts on a tiny plain model, 200 on the bundled hybrid
    python tools/try_kv_indexer.py --prompts 100 --form sglang

Needs `pip install ai-dynamo-runtime`. Starts a server with --kv-events and `python -m dynamo.indexer`, asks the indexer
about each prompt without its last token, then the server for one token, and compares in whole blocks. The indexer does
not know that a hybrid restores at checkpoints only, so there it may predict more, up to the next checkpoint; on a plain
model every prediction has to be exact. Exit status 1 if one is not, or if a hybrid restores more than was predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

import pippin
from pippin.bench.servers.processes import free_port, pippin_server

sys.path[:0] = [str(Path(__file__).parent)]

from make_plain_model import CONFIG, write_plain_model  # noqa: E402

BLOCK = 64
BUNDLED = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 8192, "torch_dtype": "float32"}
START_SECONDS, SETTLE_SECONDS, POLL_SECONDS = 120, 30, 0.05
WORKER, MODEL = 1, "model"


def prompts(count: int) -> Iterator[list[int]]:
    """Random tokens; most begin with a part of an earlier prompt."""
    rng = random.Random("prompts")
    earlier: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if earlier and rng.random() < 0.8:
            start = rng.choice(earlier)
            start = start[: rng.choice((len(start), rng.randrange(len(start) + 1)))]
        new = [rng.randrange(10, 8000) for _ in range(rng.randrange(0 if start else 1, 300))]
        earlier.append((start + new)[:1500])
        yield earlier[-1]


@contextlib.contextmanager
def indexer(events: int, replay: int, log: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            wait_until(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 200, START_SECONDS)
            worker = {"instance_id": WORKER, "model_name": MODEL, "block_size": BLOCK}
            addresses = {
                "endpoint": f"tcp://127.0.0.1:{events}",
                "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            }
            httpx.post(f"{url}/register", json=worker | addresses).raise_for_status()
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_until(is_so, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if is_so():
                return True
        time.sleep(POLL_SECONDS)
    return False


def predicted(url: str, tokens: list[int]) -> int:
    answer = httpx.post(f"{url}/query", json={"model_name": MODEL, "token_ids": tokens})
    answer.raise_for_status()
    return int(answer.json()["scores"].get(str(WORKER), {}).get("0", 0))


def compare(model: str, form: str, count: int, *, exact: bool, log: Path) -> bool:
    events, replay = free_port(), free_port()
    options = ["--memory", "3GB", "--kv-events-form", form, "--kv-events", f"tcp://127.0.0.1:{events}"]
    options += ["--kv-events-replay", f"tcp://127.0.0.1:{replay}"]
    equal = more = less = reused = 0
    with pippin_server(model, options) as server, indexer(events, replay, log) as url:
        for number, prompt in enumerate(prompts(count)):
            guess = predicted(url, prompt[:-1])
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"] // BLOCK * BLOCK
            equal, more, less = equal + (guess == cached), more + (guess > cached), less + (guess < cached)
            reused += cached > 0
            if guess < cached or (exact and guess != cached):
                print(f"prompt {number} of {len(prompt)} tokens: predicted {guess}, cached {cached}")
            # Events are published by another thread: the indexer has this prompt when it predicts it.
            whole = len(prompt) // BLOCK * BLOCK
            if exact and not wait_until(lambda: predicted(url, prompt) >= whole, SETTLE_SECONDS):
                print(f"prompt {number}: its {whole} tokens are not in the index; see {log}")
                return False
    print(
        f"{Path(model).name}, form {form}: {count} prompts, {reused} of them partly cached; predicted = cached "
        f"in {equal}, more in {more}, less in {less}",
        flush=True,
    )
    return less == 0 and (more == 0 or not exact)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--form", choices=("vllm", "sglang"), default="vllm")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain")
        plain.mkdir()
        write_plain_model(plain, CONFIG | TINY)
        log = Path(folder, "indexer.log")
        right = compare(str(plain), given.form, given.prompts, exact=True, log=log)
        few = max(1, given.prompts // 5)
        right &= compare(str(BUNDLED), given.form, few, exact=False, log=log)
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
