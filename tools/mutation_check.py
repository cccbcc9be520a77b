"""Breaks one rule of the overlap loop at a time and checks that a test notices.

    python tools/mutation_check.py [NAME ...]

Works on a copy in a temporary directory. Exits 1 if a mutant survives, 2 if its text is gone from
the source (then the mutant must be written anew) or the tests fail without one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEDULER = "src/pippin/scheduler/scheduler.py"
HARVEST = "src/pippin/scheduler/harvest.py"
ADMISSION = "src/pippin/scheduler/admission.py"
LOOP = "src/pippin/scheduler/loop.py"
FAKE = "src/pippin/backends/fake.py"
MLX_FUTURE_MAP = "src/pippin/backends/mlx/step/future_map.py"

SIMULATION = "tests/scheduler/test_simulation.py"
REPLIES = "tests/scheduler/test_replies.py"
PREFILL = "tests/scheduler/test_prefill_plans.py"
QUEUE = "tests/scheduler/test_admission.py"
GRAMMAR = "tests/scheduler/test_grammar_gate.py"
FUTURE_MAPS = "tests/scheduler/test_future_maps.py"
RANDOM = "tests/scheduler/test_random_schedules.py"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "no fence",
        SCHEDULER,
        "fenced = request.last_step > self._committed",
        "fenced = False",
        (SIMULATION, REPLIES),
    ),
    Mutant(
        "no ghost rule",
        SCHEDULER,
        '            if request.phase == "done":\n                ghosts += 1',
        "            if False:\n                ghosts += 1",
        (SIMULATION, REPLIES),
    ),
    Mutant(
        "tokens by batch order, not by slot",
        FAKE,
        "            self._tokens[slots] = ",
        "            self._tokens[np.arange(len(slots)) + 1] = ",
        (REPLIES,),
    ),
    Mutant(
        "tokens by batch order, not by slot, on mlx",
        MLX_FUTURE_MAP,
        "self._tokens[mx.array(slots.astype(np.int32))] = flat",
        "self._tokens[: len(slots)] = flat",
        (FUTURE_MAPS,),
    ),
    Mutant(
        "a cell may be read twice",
        FAKE,
        "        self._tokens[slot] = self.POISON\n        return token",
        "        return token",
        (FUTURE_MAPS,),
    ),
    Mutant(
        "a retired slot's capture goes to its next owner",
        HARVEST,
        "(retired if capture.retired else owners)[capture.slot]",
        "(owners | retired if capture.slot not in owners else owners)[capture.slot]",
        (SIMULATION, RANDOM),
    ),
    Mutant(
        "a reply's last token is not absorbed",
        SCHEDULER,
        " or not request.absorbs or ",
        " or True or ",
        (REPLIES, RANDOM),
    ),
    Mutant(
        "a reply's checkpoint replaces the retired state",
        HARVEST,
        "if at <= capture.end and at not in capture.states]",
        "if at <= capture.end]",
        (RANDOM,),
    ),
    Mutant(
        "nobody waits for a prefix that is being computed",
        ADMISSION,
        "if shared >= needed and shared > other.in_tree:",
        "if False:",
        (PREFILL,),
    ),
    Mutant(
        "no ageing in the queue",
        ADMISSION,
        "pair[0].passed_over >= MAX_PASSED_OVER",
        "False",
        (QUEUE,),
    ),
    Mutant(
        "masks are made before the last step is committed",
        LOOP,
        "        launched = self._launch(deltas)\n",
        "        launched = self._launch(deltas)\n"
        "        if launched is not None and not self._sampled(launched, deltas):\n"
        "            launched = None\n",
        (GRAMMAR,),
    ),
    Mutant(
        "one step in flight only",
        LOOP,
        "            if self.overlap:\n",
        "            if False:\n",
        (SIMULATION, GRAMMAR),
    ),
    Mutant(
        "a failed step keeps its finished replies for the tree",
        SCHEDULER,
        "            request.spoiled = True\n",
        "",
        (SIMULATION,),
    ),
    Mutant(
        "slots whose retiring failed are forgotten",
        SCHEDULER,
        "        self._lost_retires += tuple(Retire(slot) for slot in lost)\n",
        "",
        (SIMULATION,),
    ),
)


def copy_project(target: Path) -> None:
    """The package without its bundled weights, and the tests of the scheduler."""
    shutil.copytree(
        ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__", "models")
    )
    shutil.copytree(ROOT / "tests" / "scheduler", target / "tests" / "scheduler")
    shutil.copy(ROOT / "tests" / "builders.py", target / "tests")
    shutil.copy(ROOT / "pyproject.toml", target)


def tests_pass(project: Path, tests: Iterable[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1):  # neither passed nor failed: the run itself broke
        raise RuntimeError(f"pytest could not run\n{result.stdout}{result.stderr}")
    return result.returncode == 0


def is_killed(mutant: Mutant, project: Path) -> bool:
    """Whether one of the mutant's tests fails; the file is put back afterwards."""
    path = project / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return not tests_pass(project, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")


def stale_mutants() -> list[str]:
    """Mutants whose text does not occur exactly once in their file."""
    return [
        mutant.name
        for mutant in MUTANTS
        if (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) != 1
    ]


def main(names: list[str]) -> int:
    if stale := stale_mutants():
        print(f"the source has changed under: {', '.join(stale)}")
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "pippin"
        copy_project(project)
        if not tests_pass(project, sorted({test for mutant in chosen for test in mutant.tests})):
            print("the tests fail without any mutant")
            return 2
        for mutant in chosen:
            killed = is_killed(mutant, project)
            survivors += not killed
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutant.name}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
