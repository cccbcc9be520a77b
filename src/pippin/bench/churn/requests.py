"""Draws requests of all lengths, as real use has them. Knows prompts, no client.

Benchmarks of equal requests repeat their shapes; here hardly any two are alike. All are drawn from
a seed: equal seeds give equal requests, whatever the server does with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from pippin.bench.client.load import LoadRequest
from pippin.bench.prompts import Prompts

PROMPT_TOKENS = (5, 2500)  # of a request's own; every order of magnitude is as likely
SHARED_SHARE = 0.6  # of requests start with a prefix that others have too,
SHARED_TOKENS = (10, 1000)  # of this length
NUM_PREFIXES = 4
REPLY_TOKENS = (4, 300)
TEMPERATURES = (0.0, 0.0, 0.8, 1.0)
TOP_P = 0.95
DISCONNECT_SHARE = 0.1  # of clients


def churn_requests(prompts: Prompts) -> Iterator[LoadRequest]:
    shared = prompts.beside("beginnings")
    prefixes = [shared.text(SHARED_TOKENS[1]).split(" ") for _ in range(NUM_PREFIXES)]
    rng = random.Random(f"{prompts.seed}, lengths")
    while True:
        own_tokens = round(math.exp(rng.uniform(*map(math.log, PROMPT_TOKENS))))
        shared_tokens = rng.randint(*SHARED_TOKENS) if rng.random() < SHARED_SHARE else 0
        prefix = " ".join(rng.choice(prefixes)[: shared_tokens + 1])  # [0] is empty
        temperature = rng.choice(TEMPERATURES)
        sampled = {"top_p": TOP_P, "seed": rng.randrange(1 << 30)} if temperature else {}
        yield LoadRequest(
            prompt=prefix + prompts.text(own_tokens),
            prompt_tokens=shared_tokens + own_tokens,
            max_tokens=rng.randint(*REPLY_TOKENS),
            sampling={"temperature": temperature, **sampled},
            disconnects=rng.random() < DISCONNECT_SHARE,
        )
