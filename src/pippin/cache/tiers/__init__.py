"""Who has what of a prefix: the tree in memory, and one of each tier below it.

Kinds of tiers: the host's memory under a device's own, then the disk. What is said here of the disk
holds for both.

Knows tokens, trees and rates; knows no stores (`cache/disk`, `cache/host`), no arrays, no steps.

    two trees     The lower is a PrefixCache too, whose payloads name parts of entries of a
                  store. So one set of rules says where a match may end, what a split divides and
                  what goes first, and one check of integrity counts both.
    write behind  What a step has brought into the tree in memory is written soon after, once, in
                  one entry for each run of KV. A kill loses what was not written yet. Evicting what
                  is on disk costs nothing and is preferred: that is all that demotion is.
    what          All KV, hidden vectors, and states where somebody is likely to come back to: ends
                  of prompts, replies and messages, branches, and every 1,024 tokens.
    order         An entry gets into the disk's tree when it has been written, payload before index,
                  and only where it connects. Diffs of the two trees along a sequence say what is
                  missing: nothing is remembered of single payloads, so a split, an eviction or a
                  failed write leaves nothing behind that has to be mended.
    loads         What the disk has and memory lacks of a prompt, up to an endpoint that every
                  component can restore, is read into one buffer a component, becomes one payload
                  each, and goes into the tree like something a step has captured.
    damage        An entry that does not read back as it was written is dropped with all below it.
"""
