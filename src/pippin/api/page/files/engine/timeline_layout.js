// Steps as spans on lanes. Knows no canvas: times in, times out.
//
//   host    [plan|launch][wait ...][commit][plan|launch][wait ...
//   device       [ step 7 ..........][ step 8 ..........
//   slot 1       [chunk of a prompt ][ one token         ]
//   slot 2       [ one token        ][ ghost             ]
//
// `requestIn(slot, when)` is the request of a row: a row of one that had ended is a ghost.

import { sum } from "../lib/format.js";

export function layoutSteps(steps, requestIn) {
  const spans = [];
  let before = null; // when the device was done with the step before
  for (const step of steps) {
    const host = (kind, from, to) => spans.push({ lane: "host", kind, from, to, step });
    host("plan", step.planned, step.dispatched);
    host("launch", step.dispatched, step.launched);
    if (step.waited > 0) host("wait", step.resumed - step.waited, step.resumed);
    host("commit", step.resumed, step.committed);
    const from = before === null ? step.dispatched : Math.max(step.dispatched, before);
    const to = Math.max(from, step.done);
    before = to;
    const tokens = promptTokens(step);
    const kind = !step.decode.length ? "prompt" : tokens ? "mixed" : "decode";
    spans.push({ lane: "device", kind, from, to, step });
    for (const chunk of step.chunks) spans.push({ lane: chunk.slot, kind: "prompt", from, to, step });
    const ghosts = ghostSlots(step, requestIn);
    for (const slot of step.decode) {
      spans.push({ lane: slot, kind: ghosts.has(slot) ? "ghost" : "decode", from, to, step });
    }
    for (const id of step.preempted) spans.push({ lane: "mark", kind: "preempted", from: step.planned, to: step.planned, step, id });
  }
  return spans;
}

export const promptTokens = (step) => sum(step.chunks.map(({ tokens }) => tokens));

// As many as the step counted, of the slots whose requests ended before it was committed.
function ghostSlots(step, requestIn) {
  if (!step.ghosts) return new Set();
  const over = step.decode.filter((slot) => {
    const request = requestIn(slot, step.launched);
    return !request || (request.ended !== null && request.ended < step.resumed);
  });
  return new Set(over.slice(0, step.ghosts));
}

// The step that was on the device at a time, or the nearest to it.
export function stepAt(spans, when) {
  const device = spans.filter(({ lane }) => lane === "device");
  const away = ({ from, to }) => (when < from ? from - when : when > to ? when - to : 0);
  return device.reduce((best, span) => (!best || away(span) < away(best) ? span : best), null)?.step ?? null;
}
