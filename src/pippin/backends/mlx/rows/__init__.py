"""What running requests hold, and one token of each of them. Knows no tree.

`decode_rows` owns them; `grouping`, `cohorts` and `regrouping` decide and build how they lie;
`decode_step`, `views`, `listed_views`, `split_attention` and `decode_forward` are what a model sees
of them.
"""
