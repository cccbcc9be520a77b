"""One memory budget for several models: what each claims, and which are refused."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from bundled import BUNDLED_PATH
from cases import cases
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import LoadError
from pippin.startup.engines import OnDemandModels, check_fit, divide, least_bytes


def test_models_that_all_fit_share_what_is_left() -> None:
    assert divide(60, [40, 5, 5]) == [43, 8, 8]


def test_in_memory_for_one_the_largest_gets_all_of_it() -> None:
    assert divide(10, [8, 8, 8]) == [10, 10, 10]
    assert divide(10, [8, 6]) == [10, 8]


@cases("seed", range(20))
def test_any_models_that_fit_by_their_least_fit_by_their_claims(seed: int) -> None:
    chance = random.Random(seed)
    leasts = [chance.randint(1, 100) for _ in range(chance.randint(1, 6))]
    budget = chance.randint(max(leasts), 2 * sum(leasts))
    claims = divide(budget, leasts)
    together = max(k for k in range(1, len(leasts) + 1) if sum(sorted(leasts)[-k:]) <= budget)
    assert all(sum(some) <= budget for some in itertools.combinations(claims, together))
    assert all(claim >= least for claim, least in zip(claims, leasts, strict=True))


def test_a_model_that_does_not_fit_alone_is_refused_with_the_amount_that_it_needs() -> None:
    config = Config(
        ModelConfig(model=str(BUNDLED_PATH)), server=ServerConfig(served_name="stories")
    )
    least = least_bytes(config)
    weights = sum(file.stat().st_size for file in BUNDLED_PATH.glob("model*.safetensors"))
    assert weights < least < 10 * weights + 100_000_000
    with pytest.raises(LoadError, match=r"stories needs about .* MB, .*use --memory \d+"):
        check_fit(least - 1, config, least)
    check_fit(least, config, least)


def test_a_model_needs_memory_for_each_of_its_replicas_on_a_device() -> None:
    one = Config(ModelConfig(model=str(BUNDLED_PATH)), server=ServerConfig(served_name="stories"))
    two = replace(one, server=replace(one.server, replicas=2))
    memory = EngineConfig(memory=str(2 * least_bytes(one) - 1))

    async def start(config: Config) -> None:
        OnDemandModels([config], replace(config, engine=memory))

    asyncio.run(start(one))
    with pytest.raises(LoadError, match=r"needs about .* for 2 replicas, and the budget"):
        asyncio.run(start(two))


def test_float32_takes_twice_the_bytes_of_sixteen_bits() -> None:
    half = Config(ModelConfig(model=str(BUNDLED_PATH), dtype="float16"))
    full = replace(half, model=replace(half.model, dtype="float32"))
    assert least_bytes(full) > 1.5 * least_bytes(half) - 64_000_000
