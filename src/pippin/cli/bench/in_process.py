"""`pippin bench one-batch`, `backends`, `growth`, `prefix`, `overlap`, `grammar`: without HTTP."""

from __future__ import annotations

from pippin.bench.results.report import PRINT_ONLY
from pippin.cli.bench.parameters import Count, Files, Names, Numbers
from pippin.cli.options import takes_config
from pippin.config import Config
from pippin.startup.checkpoint import find_checkpoint


@takes_config("model", "engine", without=("prefix_cache",))  # every row is computed
def one_batch(
    config: Config,
    *,
    batch: Numbers = None,
    input: Count = 512,
    output: Count = 64,
    repeats: Count = 3,
    ceilings: bool = True,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Latency of prefill and decode for one batch, and how close that is to the machine's limits.

    Parameters
    ----------
    batch
        Sizes to measure. Default: 1,4,16.
    input
        Prompt tokens of each row.
    output
        Tokens that all rows decode together.
    repeats
        Runs of each size; the table shows medians.
    ceilings
        Measure what the machine allows, too: some seconds more.
    """
    from pippin.bench.in_process.one_batch import one_batch

    report = one_batch(
        config,
        batches=batch or (1, 4, 16),
        input_len=input,
        output_len=output,
        repeats=repeats,
        wants_ceilings=ceilings,
    )
    report.publish(outputs)


@takes_config("model", "engine", without=("prefix_cache", "backend"))
def backends(
    config: Config,
    *,
    backends: Names = None,
    batch: Numbers = None,
    input: Count = 512,
    output: Count = 64,
    rounds: Count = 3,
    outputs: Files = PRINT_ONLY,
) -> None:
    """The same model on several backends, in turn: first token, prefill and decode by width.

    Parameters
    ----------
    backends
        Two or more of them; the others are compared with the first. Default: mlx,torch.
    batch
        Sizes to measure. Default: 1,4,16.
    input
        Prompt tokens of each row.
    output
        Tokens that all rows decode together.
    rounds
        How often each backend is started and measured; the table shows medians.
    """
    from pippin.bench.in_process.backends import Lengths
    from pippin.bench.in_process.backends import backends as measure

    lengths = Lengths(tuple(batch or (1, 4, 16)), input, output)
    measure(config, names=backends or ("mlx", "torch"), lengths=lengths, rounds=rounds).publish(
        outputs
    )


@takes_config("model", "engine")
def growth(config: Config, *, only: Names = None, outputs: Files = PRINT_ONLY) -> None:
    """How a step grows with batch, context, skewed lengths, the cache's tree and requests.

    Parameters
    ----------
    only
        Parts to run: batch, context, skew, tree, requests. Default: everything.
    """
    from pippin.bench.in_process.growth import growth

    growth(config, only=only or ()).publish(outputs)


@takes_config("model", "engine")
def prefix(
    config: Config,
    *,
    only: Names = None,
    rounds: Count = 3,
    pairs: Count = 12,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Time to the first token with and without the prefix cache, and what the cache costs.

    Parameters
    ----------
    only
        Parts to run: repeat, chat, fan-out, cost. Default: everything.
    rounds
        Prompts for `repeat`; the table shows medians.
    pairs
        New prompts for `cost`, each with and without a cache.
    """
    from pippin.bench.served.prefix import prefix

    report = prefix(
        config, find_checkpoint(config.model), only=only or (), rounds=rounds, num_pairs=pairs
    )
    report.publish(outputs)


@takes_config("model", "engine")
def overlap(
    config: Config,
    *,
    streams: Count = 8,
    output: Count = 128,
    pairs: Count = 12,
    outputs: Files = PRINT_ONLY,
) -> None:
    """The same streams with and without overlap, in turn: throughput, step, idle device.

    Parameters
    ----------
    streams
        Requests that decode together.
    output
        Tokens of each stream.
    pairs
        How often each way runs; ratios are taken within pairs.
    """
    from pippin.bench.in_process.overlap import overlap

    report = overlap(config, num_streams=streams, num_tokens=output, num_pairs=pairs)
    report.publish(outputs)


@takes_config("model", "engine")
def grammar(
    config: Config,
    *,
    streams: Count = 16,
    output: Count = 96,
    pairs: Count = 8,
    outputs: Files = PRINT_ONLY,
) -> None:
    """What constrained replies cost, and what running forced tokens in chunks saves.

    Parameters
    ----------
    streams
        Requests that decode together; every second one is constrained.
    output
        Tokens of each stream.
    pairs
        How often each way runs; ratios are taken within pairs.
    """
    from pippin.bench.in_process.grammar import grammar

    report = grammar(config, num_streams=streams, num_tokens=output, num_pairs=pairs)
    report.publish(outputs)
