"""Tiers below the tree in memory: host memory under a device's own, then the disk.

Knows tokens, trees, entries and rates; knows no files, no arrays, no steps.

    trees         Each tier has a PrefixCache too, whose payloads are parts of a store's entries. So
                  one set of rules says where a match may end and what a split divides, and one
                  check of integrity counts both.
    write behind  What a step inserted in memory is written soon after, once, in one entry for each
                  run of KV. A kill loses what was not written yet. What a tier has is evicted from
                  memory first, at no cost: there is no other demotion.
    what          All KV, hidden vectors, and states where a request is likely to continue: ends of
                  prompts, replies and messages, branches, and every 1,024 tokens.
    order         An entry is added to the tier's tree when it has been written, payload before
                  index, and only where it connects. Diffs of the two trees along a sequence say
                  what is missing, so a split, an eviction or a failed write needs no repair.
    loads         What a tier has and memory lacks of a prompt, up to an endpoint that every
                  component can restore, is read into one buffer a component, becomes one payload
                  each, and is inserted like something that a step captured.
    damage        An entry that does not read back as it was written is dropped with all below it.
"""
