// What a run has at its steps, below the slider that chooses one: rollouts, evaluations, checkpoints, what the health checks found.

import { el, fill } from "./dom.js";

const KINDS = { rollouts: "rollouts", evaluation: "evaluation", checkpoint: "checkpoint", finding: "finding" };
const MOST = 150; // of a kind: more of them would be one line

export class Marks {
  constructor(go) {
    this.element = el("span", { class: "marks", "aria-hidden": "true", onclick: (event) => { const mark = event.target.closest("i"); if (mark) go(Number(mark.dataset.step)); } });
    this.legend = el("span", { class: "marks-legend soft" });
    this.found = [];
  }

  // The slider stands at the number of a recorded step: other steps are between its neighbours.
  draw(steps, run, findings) {
    const found = [
      ...thinned(steps).map((step) => ({ step, kind: "rollouts", text: "" })),
      ...thinned(run.evaluations).map((step) => ({ step, kind: "evaluation", text: "evaluation" })),
      ...thinned(run.checkpoints).map((step) => ({ step, kind: "checkpoint", text: "checkpoint" })),
      ...findings.map((one) => ({ step: one.since, kind: "finding", text: `${one.check.replaceAll("_", " ")} ${one.state}` })),
    ];
    const key = JSON.stringify([steps, found]);
    if (key === this.key) return;
    this.key = key;
    this.found = found;
    fill(this.element, found.map(({ step, kind, text }) => el("i", { class: kind, "data-step": step, title: `step ${step}${text ? `: ${text}` : ""}`, style: { "--at": String(place(steps, step)) } })));
    const kinds = new Set(found.map((one) => one.kind));
    fill(this.legend, Object.entries(KINDS).filter(([kind]) => kinds.has(kind)).map(([kind, title]) => el("span", {}, el("i", { class: kind, "aria-hidden": "true" }), title)));
  }

  // For who does not see them.
  said(step) {
    return this.found.filter((one) => one.step === step && one.text).map((one) => `, ${one.text}`).join("");
  }
}

function thinned(steps) {
  const stride = Math.ceil(steps.length / MOST);
  return stride > 1 ? steps.filter((_, at) => at % stride === 0) : steps;
}

// From 0 to 1 along the slider.
function place(steps, step) {
  const last = steps.length - 1;
  if (last < 1 || step <= steps[0]) return 0;
  const after = steps.findIndex((one) => one >= step);
  if (after < 0) return 1;
  return (after - (steps[after] - step) / (steps[after] - steps[after - 1])) / last;
}
