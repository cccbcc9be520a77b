"""As on macOS: no /proc, no /sys, no CPU affinity, no glibc. The bundled model is still served."""

from __future__ import annotations

import pytest

from processes import run_python

pytestmark = pytest.mark.slow

# Before anything of Pippin's is imported: what Linux has and macOS does not is taken away.
AS_ON_A_MAC = """
import builtins, io, os, pathlib, platform, sys

for name in ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate",
             "memfd_create", "pipe2", "pidfd_open", "eventfd", "waitid"):
    if hasattr(os, name):
        delattr(os, name)

def hidden(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys/"))

def hide(function):
    def call(path, *args, **kwargs):
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *args, **kwargs)
    return call

for module, names in ((os, ("open", "stat", "listdir", "scandir")), (io, ("open",)),
                      (builtins, ("open",))):
    for name in names:
        setattr(module, name, hide(getattr(module, name)))

from pippin.backends import host

platform.system = lambda: "Darwin"  # only now: libraries ask when they are imported

from pippin import LLM, SamplingParams
from pippin.backends.nvidia import compute_capability
from pippin.config import Config, EngineConfig

assert host.cpu_quota() is None and host.num_threads() >= 1 and host.host_memory_bytes() > 0
assert compute_capability() is None
with LLM(config=Config(engine=EngineConfig(memory="2GB", max_running=2))) as llm:
    reply = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0.0))[0]
    grammar = SamplingParams(max_tokens=8, temperature=0.0, regex="(yes|no)")
    chosen = llm.generate("Is it?", grammar)[0]
print(len(reply.tokens), chosen.text)
"""


def test_the_bundled_model_is_served_without_proc() -> None:
    num_tokens, chosen = run_python(AS_ON_A_MAC).splitlines()[-1].split()
    assert num_tokens == "8"
    assert chosen in ("yes", "no")
