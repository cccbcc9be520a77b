// Steps as spans on lanes. Knows no canvas: times in, times out.
//
//   host    [plan|launch][wait ...][commit][plan|launch][wait ...
//   device       [ step 7 ..........][ step 8 ..........
//   slot 1       [chunk of a prompt ][ one token         ]
//   slot 2       [ one token        ][ ghost             ]
//   slot 3       [token|right|wrong ]                        two drafts, of which one was right
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
    const drafts = new Map(step.drafts.map(([slot, ...counts]) => [slot, counts]));
    for (const slot of step.decode) {
      const [verified, accepted] = ghosts.has(slot) ? [0, 0] : drafts.get(slot) ?? [0, 0];
      const at = (n) => from + ((to - from) * n) / (1 + verified);
      spans.push({ lane: slot, kind: ghosts.has(slot) ? "ghost" : "decode", from, to: at(1), step });
      for (let n = 1; n <= verified; n += 1) {
        spans.push({ lane: slot, kind: n <= accepted ? "accepted" : "rejected", from: at(n), to: at(n + 1), step });
      }
    }
    for (const id of step.preempted) spans.push({ lane: "mark", kind: "preempted", from: step.planned, to: step.planned, step, id });
  }
  return spans;
}

export const verifiedDrafts = (step) => sum(step.drafts.map(([, verified]) => verified));

export const acceptedDrafts = (step) => sum(step.drafts.map(([, , accepted]) => accepted));

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
