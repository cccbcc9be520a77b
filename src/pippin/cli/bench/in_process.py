"""`pippin bench one-batch`, `growth`, `prefix`, `features` and `speculate`: options of each."""

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
        Lengths of the prompts to measure, in tokens. Default: 512. Long contexts, for example:
        8192,32768,131072.
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


@takes_config("model", "engine", without=("prefix_cache",))
def prefix(
    config: Config, *, only: Names = None, rounds: Count = 3, outputs: Files = PRINT_ONLY
) -> None:
    """Measure time to first token with and without the prefix cache.

    Parameters
    ----------
    only
        Parts to run: repeat, chat, fan-out. Default: all.
    rounds
        Number of prompts and conversations; the table shows medians.
    """
    from pippin.bench.served.prefix import prefix

    prefix(config, find_checkpoint(config.model), only=only or (), rounds=rounds).publish(outputs)


@takes_config("model", "engine", without=("prefix_cache", "overlap", "forced_chunks"))
def features(
    config: Config,
    *,
    only: Names = None,
    streams: Count = 8,
    output: Count = 128,
    pairs: Count = 12,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Measure what overlap, grammars, forced chunks and the prefix cache gain or cost.

    Each is compared with the same work without it, in the same process and in turn.

    Parameters
    ----------
    only
        Features to measure: overlap, grammar, forced-chunks, prefix-cache. Default: all.
    streams
        Number of requests in the batch of overlap and grammar.
    output
        Length of their replies, in tokens.
    pairs
        Number of pairs of runs, one of each kind; ratios are computed within a pair.
    """
    from pippin.bench.in_process.features import features

    report = features(
        config, only=only or (), num_streams=streams, num_tokens=output, num_pairs=pairs
    )
    report.publish(outputs)


@takes_config("model", "engine", without=("prefix_cache", "speculate"))
def speculate(
    config: Config,
    *,
    only: Names = None,
    rows: Numbers = None,
    output: Count = 128,
    pairs: Count = 5,
    outputs: Files = PRINT_ONLY,
) -> None:
    """Measure what drafts gain and cost: the same replies with and without them, in turn.

    oracle: drafts that are right at 0, 50, 80 and 100% of places. edits: each request predicts its
    reply, with one word changed. new: sampled stories. mtp: greedy stories with the MTP head of the
    checkpoint, where it has one. draft: the same with the draft model, where one is given.

    Parameters
    ----------
    only
        Parts to run: oracle, edits, new, mtp, draft. Default: all.
    rows
        Batch sizes to measure. Default: 1,4,8,32.
    output
        Length of the longest reply of a batch, in tokens; the shortest has half of it.
    pairs
        Number of pairs of runs, one with drafts and one without; ratios are computed within a pair.
    """
    from pippin.bench.in_process.speculate import speculate

    report = speculate(
        config, only=only or (), rows=rows or (1, 4, 8, 32), num_tokens=output, num_pairs=pairs
    )
    report.publish(outputs)
