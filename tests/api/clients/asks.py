"""Programs that ask a server by a client library, each in a process of its own. Knows no library.

A library may leave connections open and warn as it likes there; in the process of the tests, where
warnings are errors, each of them would fail a test, and not always its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Ask = Callable[..., Any]
Answer = Callable[..., Any]


def answer_asks(*asks: Ask) -> None:
    """The program: for each line with a function's name and arguments, a line with its result."""
    by_name = {ask.__name__: ask for ask in asks}
    answers, sys.stdout = sys.stdout, sys.stderr  # a library may print
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"result": by_name[name](*arguments)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=answers, flush=True)


@contextmanager
def running(program: str) -> Iterator[Answer]:
    """The tests' side: calls functions of the program by name, one at a time."""
    path = Path(__file__).with_name(program)
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(name: str, *arguments: Any) -> Any:
            stdin.write(json.dumps([name, arguments]) + "\n")
            stdin.flush()
            reply = json.loads(stdout.readline())
            assert "error" not in reply, reply["error"]
            return reply["result"]

        yield ask
        process.kill()  # nothing of it is needed any more
