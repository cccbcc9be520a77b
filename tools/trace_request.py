"""Count the files, functions and calls of Pippin that one streamed chat passes through, in the server and the engine.

    python tools/trace_request.py [--list] [SERVE OPTIONS…]

Starts a server with the bundled model (or what the options name), sends the same streamed chat three times, and counts
the third. `--list` prints the files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

TOKENS = 24
# Runs in each process of the server before anything else. A signal starts the count, the next one writes it down.
HOOK = '''
import os, signal, sys, threading
_calls, _counting, _folder = {}, False, os.environ["TRACE_FOLDER"]
def _profile(frame, event, arg):
    if _counting and event == "call":
        code = frame.f_code
        _calls[code] = _calls.get(code, 0) + 1
def _toggle(number, frame):
    global _counting
    _counting = not _counting
    if _counting:
        return
    with open(os.path.join(_folder, f"{os.getpid()}.part"), "w") as file:
        for code, calls in list(_calls.items()):
            print(code.co_filename, code.co_qualname, calls, sep="\\t", file=file)
    os.replace(file.name, os.path.join(_folder, f"{os.getpid()}.calls"))
signal.signal(signal.SIGUSR1, _toggle)
threading.setprofile(_profile)
sys.setprofile(_profile)
'''
BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "stream": True,
    "temperature": 0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


def main(args: list[str]) -> int:
    calls = count(*[arg for arg in args if arg != "--list"])
    for title, inside in (("outside backends", False), ("in backends", True)):
        part = {key: number for key, number in calls.items() if is_backend(key[0]) == inside}
        files, functions = passed_through(calls, inside)
        print(f"{title}: {files} files, {functions} functions, {sum(part.values()):,} calls")
        for file in sorted({file for file, _ in part}) if "--list" in args else ():
            mine = [number for (name, _), number in part.items() if name == file]
            print(f"    {file}: {len(mine)} functions, {sum(mine):,} calls")
    return 0


def count(*options: str) -> Counter[tuple[str, str]]:
    """Calls of a streamed chat, by file and function."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": path, "TRACE_FOLDER": folder}
        command = [sys.executable, "-m", "pippin", "serve", "--port", "0", *options]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
            try:
                return traced(server, Path(folder))
            finally:
                server.terminate()


def is_backend(file: str) -> bool:
    return file.startswith("backends/")


def passed_through(calls: Counter[tuple[str, str]], in_backends: bool) -> tuple[int, int]:
    """How many files and functions, in backends or outside of them."""
    part = [key for key in calls if is_backend(key[0]) == in_backends]
    return len({file for file, _ in part}), len(part)


def traced(server: subprocess.Popen[str], folder: Path) -> Counter[tuple[str, str]]:
    """Calls of the third chat, by file and function."""
    assert server.stdout is not None
    url = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line)))
    with httpx.Client(base_url=url, timeout=120) as client:
        BODY["model"] = client.get("/v1/models").json()["data"][0]["id"]
        for _ in range(2):
            chat(client)
        pids = processes(server.pid)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        chat(client)
        time.sleep(0.2)
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 20
        while len(list(folder.glob("*.calls"))) < len(pids):
            assert time.monotonic() < deadline, "a process did not write its calls down"
            time.sleep(0.05)
    calls: Counter[tuple[str, str]] = Counter()
    for file in folder.glob("*.calls"):
        for line in file.read_text().splitlines():
            name, function, count = line.split("\t")
            if "/pippin/" in name and "/tools/" not in name:
                calls[name.rpartition("/pippin/")[2], function] += int(count)
    return calls


def chat(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=BODY) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line


def processes(server: int) -> list[int]:
    """The server and the engine, which is its child; not what compiles grammars."""
    children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(server)], capture_output=True, text=True, check=True)
    found = [line.split(None, 1) for line in children.stdout.splitlines()]
    return [server, *(int(pid) for pid, command in found if "ps" != command.split()[0])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
