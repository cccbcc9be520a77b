"""Count the files, functions and calls of Pippin that one streamed chat passes through, in the server and the engine.

    python tools/trace_request.py [--list] [SERVE OPTIONS…]

Starts a server with the bundled model (or what the options name), sends the same streamed chat three times, and counts
the third. `--list` prints the files in the order in which the chat first enters them.
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
    listed = "--list" in args
    args = [arg for arg in args if arg != "--list"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": path, "TRACE_FOLDER": folder}
        command = [sys.executable, "-m", "pippin", "serve", "--port", "0", *args]
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            calls = traced(server, Path(folder))
        finally:
            server.terminate()
            server.wait(timeout=30)
    report(calls, listed)
    return 0


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


def report(calls: Counter[tuple[str, str]], listed: bool) -> None:
    for title, inside in (("outside backends", False), ("in backends", True)):
        part = {key: count for key, count in calls.items() if key[0].startswith("backends/") == inside}
        files = {file for file, _ in part}
        print(f"{title}: {len(files)} files, {len(part)} functions, {sum(part.values()):,} calls")
        if listed:
            for file in sorted(files):
                mine = [count for (name, _), count in part.items() if name == file]
                print(f"    {file}: {len(mine)} functions, {sum(mine):,} calls")
    print(f"in all: {len({file for file, _ in calls})} files, {len(calls)} functions, {sum(calls.values()):,} calls")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
