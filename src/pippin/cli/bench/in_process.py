"""`pippin bench one-batch`, `growth`, `prefix`, `overlap`, `grammar`: options of each."""

from __future__ import annotations

from pippin.bench.results.report import PRINT_ONLY
from pippin.cli.bench.parameters import Count, Files, Names, Numbers
from pippin.cli.options import takes_config
from pippin.config import Config
from pippin.startup.find_checkpoint import find_checkpoint


@takes_config("model", "engine", without=("prefix_cache",))  # every row is computed
def one_batch(
    config: Config,
    *,
    batch: Numbers = None,
    input: Numbers = None,
    output: Count = 64,
    repeats: Count = 3,
    ceilings: bool = True,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Measure prefill and decode of one batch, and how close they are to the machine's limits.

    Parameters
    ----------
    batch
        Batch sizes to measure. Default: 1,4,16.
    input
        Lengths of the prompts to measure, in tokens. Default: 512.
    output
        Number of tokens that each request of the batch decodes.
    repeats
        Number of runs per batch size and prompt length; the table shows medians.
    ceilings
        Also measure the limits of the machine, which takes a few seconds.
    """
    from pippin.bench.in_process.one_batch import one_batch

    report = one_batch(
        config,
        batches=batch or (1, 4, 16),
        input_lens=input or (512,),
        output_len=output,
        repeats=repeats,
        wants_ceilings=ceilings,
    )
    report.publish(outputs)


@takes_config("model", "engine")
def growth(config: Config, *, only: Names = None, outputs: Files = PRINT_ONLY) -> None:
    """Measure how step time grows with skewed lengths, the size of the cache and requests.

    Parameters
    ----------
    only
        Parts to run: skew, tree, requests. Default: all.
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
    """Measure time to first token with and without the prefix cache, and what the cache costs.

    Parameters
    ----------
    only
        Parts to run: repeat, chat, fan-out, cost. Default: all.
    rounds
        Number of prompts in part `repeat`; the table shows medians.
    pairs
        Number of new prompts in part `cost`, each run with and without a cache.
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
    """Compare streams with and without overlap: throughput, step time and idle time of the device.

    Parameters
    ----------
    streams
        Number of requests in the batch.
    output
        Length of each reply, in tokens.
    pairs
        Number of pairs of runs, one of each kind; ratios are computed within a pair.
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
    """Measure what constrained replies cost, and what chunks of forced tokens save.

    Parameters
    ----------
    streams
        Number of requests in the batch; every second one is constrained.
    output
        Length of each reply, in tokens.
    pairs
        Number of pairs of runs, one of each kind; ratios are computed within a pair.
    """
    from pippin.bench.in_process.grammar import grammar

    report = grammar(config, num_streams=streams, num_tokens=output, num_pairs=pairs)
    report.publish(outputs)
