"""Finds out in child processes whether grammars can be compiled. Knows no model and no requests.

engine                          zygote: one process, one thread        children, forked from it
  Prover   ── a grammar ──▶       has the vocabulary          ──▶        compile one grammar each,
           ◀── a verdict ──       kills late ones             ◀──        and exit

A compiler of untrusted grammars may overflow its stack, allocate without end, or never return. If a
child does, only its own request fails. The zygote is a new process: it never had the
engine's threads, sockets or device, so forking it is safe, and children share its vocabulary.
"""
