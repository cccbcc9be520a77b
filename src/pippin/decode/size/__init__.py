"""How large a grammar is, found in one pass over its text. Compiles nothing and knows no tokens.

A small text can become a large grammar: a repetition of repetitions, terminals that are inlined
twice in each other, references that a compiler follows until its stack overflows. The checks take
time linear in the text and do not recurse. They are estimates: whether a grammar can be compiled is
found out by a child process with limits (`pippin.decode.proving`).
"""
