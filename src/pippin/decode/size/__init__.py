"""How large a grammar is, found in one pass over its text. Compiles nothing and knows no tokens.

A small text can ask for much: a repetition of repetitions, terminals that are inlined twice in each
other, references that a compiler follows until its stack overflows. What is measured here takes
time linear in the text, and no recursion. It is an estimate: whether a grammar can be compiled is
found out by a child process, which may run out of what it was given (`pippin.decode.pool`).
"""
