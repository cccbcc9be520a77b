"""The page's modules by themselves, in a browser: what goes in and what comes out, no pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, open_browser, visiting
from scripted_engine import ScriptedEngine, say, serving

pytestmark = needs_browser

URL = "https://a.example/b_(c"
SAMPLE = Path(__file__).parents[1] / "events" / "sample.events"


@pytest.fixture(scope="module")
def call() -> Iterator[Callable[..., Any]]:
    """`call("lib/markdown.js", "parseInline(a)", a=...)`: an expression over a module."""
    with (
        open_browser() as browser,
        serving(ScriptedEngine(say("Hi."))) as url,
        visiting(browser, url) as visit,
    ):

        def run(module: str, expression: str, **values: Any) -> Any:
            names = ", ".join(values)
            return visit.page.evaluate(
                f"""async ({{ {names} }}) => {{
                    const module = await import("/page/{module}");
                    const {{ {_exported(module)} }} = module;
                    return {expression};
                }}""",
                values,
            )

        yield run


def _exported(module: str) -> str:
    from pippin.api.page import FILES

    lines = (FILES / module).read_text().splitlines()
    exports = [line.split() for line in lines if line.startswith("export ")]
    names = [words[3] if words[1] == "async" else words[2] for words in exports]
    return ", ".join(name.split("(")[0].rstrip("*;") for name in names if name != "*")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a *b* c", ["a ", {"type": "em", "parts": ["b"]}, " c"]),
        (
            "**a *b* c**",
            [{"type": "strong", "parts": ["a ", {"type": "em", "parts": ["b"]}, " c"]}],
        ),
        ("``a `b` c``", [{"type": "code", "text": "a `b` c"}]),
        ("`**a**`", [{"type": "code", "text": "**a**"}]),
        (r"\*a\* 2 * 3 * 4", ["*a* 2 * 3 * 4"]),
        ("snake_case_name and _em_", ["snake_case_name and ", {"type": "em", "parts": ["em"]}]),
        ("unclosed **bold and `code", ["unclosed **bold and `code"]),
        ("[a](javascript:alert(1))", [{"type": "span", "parts": ["a"]}]),
        (
            f"see {URL}).",
            ["see ", {"type": "link", "href": URL, "parts": [URL]}, ")."],
        ),
        ("<script>alert(1)</script>", ["<script>alert(1)</script>"]),
    ],
)
def test_marks_inside_of_lines(call: Any, text: str, parts: list[Any]) -> None:
    assert call("lib/markdown.js", "parseInline(text)", text=text) == parts


def shape(block: dict[str, Any]) -> Any:
    """A block's kind and what is inside, for short."""
    match block:
        case {"type": "list", "items": items, "ordered": ordered}:
            kind = "ol" if ordered else "ul"
            return [kind, *[[shape(inner) for inner in item["blocks"]] for item in items]]
        case {"type": "quote", "blocks": blocks}:
            return ["quote", *map(shape, blocks)]
        case {"type": "table", "head": head, "rows": rows}:
            return ["table", head, *rows]
        case {"type": kind, "text": text}:
            return [kind, text]
    return [block["type"]]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a\nb\n\nc", [["paragraph", "a\nb"], ["paragraph", "c"]]),
        ("# A #\ntext", [["heading", "A"], ["paragraph", "text"]]),
        ("```py\n# no heading\n\n```\nafter", [["code", "# no heading\n"], ["paragraph", "after"]]),
        ("~~~\nopen", [["code", "open"]]),
        (
            "- a\n- b\n  - c\n  - d\n- e",
            [
                [
                    "ul",
                    [["paragraph", "a"]],
                    [["paragraph", "b"], ["ul", [["paragraph", "c"]], [["paragraph", "d"]]]],
                    [["paragraph", "e"]],
                ]
            ],
        ),
        (
            "1. a\n\n   more\n2. b",
            [["ol", [["paragraph", "a"], ["paragraph", "more"]], [["paragraph", "b"]]]],
        ),
        ("- a\n  ```\n  x\n  ```", [["ul", [["paragraph", "a"], ["code", "x"]]]]),
        ("> a\n> - b\nlazy", [["quote", ["paragraph", "a"], ["ul", [["paragraph", "b\nlazy"]]]]]),
        ("|a|b|\n|-|-|\n|1|2|\n|3|", [["table", ["a", "b"], ["1", "2"], ["3", ""]]]),
        ("a | b\nno table", [["paragraph", "a | b\nno table"]]),
        ("a\n\n---\n* * *", [["paragraph", "a"], ["rule"], ["rule"]]),
        ("-", [["ul", []]]),
    ],
)
def test_blocks(call: Any, text: str, blocks: list[Any]) -> None:
    assert list(map(shape, call("lib/markdown.js", "parseBlocks(text)", text=text))) == blocks


def test_every_beginning_of_a_text_is_drawn_as_the_text_is_in_the_end(call: Any) -> None:
    """Blocks that have not changed keep their elements; the whole must look as if drawn at once."""
    text = "# A\n\n- one\n- two **b**\n\n|a|b|\n|---|---|\n|1|2|\n\n```py\nx = 1\n```\n> q\n\nend"
    same = call(
        "lib/markdown.js",
        """(() => {
            const grown = document.createElement("div"), once = document.createElement("div");
            for (let n = 1; n <= text.length; n += 1) renderMarkdown(grown, text.slice(0, n));
            renderMarkdown(once, text);
            return grown.isEqualNode(once) && grown.children.length;
        })()""",
        text=text,
    )
    assert same == 6


def test_long_and_hostile_texts_take_no_time_to_speak_of(call: Any) -> None:
    for text in ("*" * 5000, "[" * 5000, "> " * 3000, "- " * 3000, "`" * 5001, "_a" * 5000):
        assert call("lib/markdown.js", "parseBlocks(text).length", text=text) >= 1
        call("lib/markdown.js", "parseInline(text).length", text=text)


NODES = [
    {"id": 1, "parent": 0, "start": 0, "tokens": 64},
    {"id": 2, "parent": 1, "start": 64, "tokens": 10},
    {"id": 3, "parent": 1, "start": 64, "tokens": 36},
    {"id": 4, "parent": 3, "start": 100, "tokens": 5},
    {"id": 5, "parent": 0, "start": 0, "tokens": 7},
    {"id": 6, "parent": 99, "start": 50, "tokens": 5},  # its parent is not told
]


def test_a_node_is_as_wide_as_its_tokens_and_as_high_as_its_leaves(call: Any) -> None:
    laid = call(
        "engine/icicle.js",
        "layoutTree(new Map(nodes.map((node) => [node.id, node])))",
        nodes=NODES,
    )
    boxes = {
        box["id"]: (box["x"], box["width"], box["top"], box["bottom"]) for box in laid["boxes"]
    }
    assert boxes == {
        1: (0, 64, 0, 2),
        2: (64, 10, 0, 1),
        3: (64, 36, 1, 2),
        4: (100, 5, 1, 2),
        5: (0, 7, 2, 3),
        6: (50, 5, 3, 4),
    }
    assert (laid["leaves"], laid["tokens"]) == (4, 105)


def test_a_deep_tree_is_laid_out_too(call: Any) -> None:
    leaves = call(
        "engine/icicle.js",
        """layoutTree(new Map(Array.from({ length: 20000 }, (_, n) =>
            [n + 1, { id: n + 1, parent: n, start: n, tokens: 1 }]))).leaves""",
    )
    assert leaves == 1


@pytest.mark.parametrize(
    ("id", "key", "there"),
    [
        (1, "ArrowRight", 2),
        (2, "ArrowDown", 3),
        (3, "ArrowUp", 2),
        (4, "ArrowLeft", 3),
        (2, "ArrowUp", None),
    ],
)
def test_arrows_lead_to_children_siblings_and_parents(
    call: Any, id: int, key: str, there: int | None
) -> None:
    expression = """neighbour(layoutTree(new Map(nodes.map((node) => [node.id, node]))).boxes,
                              id, key)?.id ?? null"""
    found = call("engine/icicle.js", expression, nodes=NODES, id=id, key=key)
    assert found == there


def sample() -> list[tuple[str, Any]]:
    records = [
        record.splitlines() for record in SAMPLE.read_text().split("\n\n") if "data:" in record
    ]
    return [
        (event.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for event, data in records
    ]


def test_a_recorded_run_is_counted_as_it_was_told(call: Any) -> None:
    """The sample has a snapshot and then frames: what is kept is what all of them say together."""
    messages = sample()
    told = [step for _, message in messages for step in message["steps"]]
    kept = call(
        "engine/state.js",
        """(() => {
            const state = new State();
            for (const [event, message] of messages) state.apply(event, message);
            return {
                steps: state.steps.map(({ step }) => step), requests: [...state.requests.keys()],
                nodes: [...state.tree.nodes.values()].filter(({ evicted }) => evicted === undefined)
                    .reduce((sum, { tokens }) => sum + tokens, 0),
                numTokens: state.tree.numTokens, gaps: state.gaps.length, ttfts: state.ttfts,
            };
        })()""",
        messages=messages,
    )
    assert kept["steps"] == sorted({step["step"] for step in told})
    assert kept["nodes"] == kept["numTokens"] > 0  # all nodes of a small tree are told
    requests = {r["id"]: r for _, message in messages for r in message["requests"]}
    assert set(kept["requests"]) == set(requests)
    first = [
        r["first_token"] - r["arrived"] for r in requests.values() if r["first_token"] is not None
    ]
    assert sorted(kept["ttfts"]) == pytest.approx(sorted(first))
    assert 0 < kept["gaps"] <= sum(len(step["decode"]) for step in told)


def test_lanes_hold_every_row_and_do_not_overlap_themselves(call: Any) -> None:
    messages = sample()
    spans = call(
        "engine/timeline.js",
        """(await import("/page/engine/state.js").then(({ State }) => {
            const state = new State();
            for (const [event, message] of messages) state.apply(event, message);
            return layoutSteps(state.steps, (slot, when) => state.requestIn(slot, when))
                .map((span) => ({ ...span, step: span.step.step }));
        }))""",
        messages=messages,
    )
    steps = {step["step"]: step for _, message in messages for step in message["steps"]}
    rows = [span for span in spans if isinstance(span["lane"], int)]
    assert len(rows) == sum(len(s["chunks"]) + len(s["decode"]) for s in steps.values())
    ghosts = [span for span in rows if span["kind"] == "ghost"]
    assert len(ghosts) == sum(step["ghosts"] for step in steps.values())
    for lane in ("host", "device"):
        own = sorted(
            (s["from"], s["to"]) for s in spans if s["lane"] == lane and s["to"] > s["from"]
        )
        assert own
        assert all(before[1] <= after[0] + 2e-6 for before, after in pairwise(own))


def test_drafts_share_the_time_of_their_row(call: Any) -> None:
    step = next(step for _, message in sample() for step in message["steps"] if step["decode"])
    step |= {"ghosts": 0, "drafts": [[step["decode"][0], 3, 2]]}
    spans = call("engine/timeline.js", "layoutSteps([step], () => null)", step=step)
    row = [span for span in spans if span["lane"] == step["decode"][0]]
    assert [span["kind"] for span in row] == ["decode", "accepted", "accepted", "rejected"]
    (device,) = (span for span in spans if span["lane"] == "device")
    assert (row[0]["from"], row[-1]["to"]) == (device["from"], device["to"])
    assert all(before["to"] == after["from"] for before, after in pairwise(row))
    said = call("engine/timeline.js", "describeStep(step)", step=step)
    assert "2 of 3 drafts accepted" in said


def test_a_quantile_is_one_of_the_values(call: Any) -> None:
    values = [0.001, 0.0012, 0.01, 0.5, 3.0]
    assert call("engine/state.js", "quantile(values, 0.5)", values=values) == 0.01


@pytest.mark.parametrize(
    ("received", "sent", "shown"),
    [(None, None, ""), (3, None, "3received"), (None, 4, "4sent"), (3, 4, "3 / 4received / sent")],
)
def test_engines_with_a_role_show_prompts_that_were_handed_over(
    call: Any, received: int | None, sent: int | None, shown: str
) -> None:
    load = sample()[0][1]["load"] | {"received": received, "sent": sent}
    expression = """(() => {
        const numbers = new Numbers();
        const none = { facts: { slots: 4 }, rates: [], ttfts: [], gaps: [], steps: [], at: 0 };
        numbers.draw({ ...none, load });
        const cell = numbers.element.querySelector(".handed");
        return [numbers.element.classList.contains("with-role"), cell.textContent];
    })()"""
    has_role, text = call("engine/charts.js", expression, load=load)
    assert (has_role, text) == (bool(shown), f"Prompts handed over{shown}")
