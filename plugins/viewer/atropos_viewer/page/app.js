// The page: which runs are shown, which view, and following runs that go on.

import { el, fill, roving, show } from "./dom.js";
import { openSource } from "./source.js";
import { Curves } from "./curves.js";
import { Rollouts } from "./rollouts.js";
import { Evaluations } from "./evaluations.js";
import { Times } from "./times.js";
import { Keys } from "./keys.js";

const FOLLOW_MS = 1500;
const REST_MS = 10000; // between looks at runs that have ended: one may be resumed
const VIEWS = { curves: ["Curves", Curves], rollouts: ["Rollouts", Rollouts], evaluations: ["Evaluation", Evaluations], times: ["Time", Times] };

class App {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.runs = [];
    this.tables = []; // of each run: {edition, steps, columns, findings}
    this.shown = new Set();
    this.views = {}; // by the names of VIEWS
  }

  async start() {
    this.runs = await this.source.get("runs");
    this.shown = new Set(this.runs.keys());
    this.tables = this.runs.map(() => ({ edition: "0", steps: [], columns: Object.create(null), findings: [] }));
    this.build();
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.keys.pressed(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.view?.restyle?.());
    this.route(); // rollouts need no curves
    await Promise.all(this.runs.map((_, at) => this.readMetrics(at)));
    this.read = true;
    this.view.update();
    document.documentElement.dataset.ready = "true";
    if (this.source.follows) this.follow();
  }

  async readMetrics(at) {
    const table = this.tables[at];
    const query = { since: table.steps.at(-1) ?? -1, edition: table.edition };
    const fresh = await this.source.get(`runs/${at}/metrics`, query);
    if (fresh.from === 0) {
      table.steps = [];
      table.columns = Object.create(null); // a metric may be called "constructor"
    }
    const before = table.steps.length;
    table.steps = table.steps.concat(fresh.steps);
    for (const name of new Set([...Object.keys(table.columns), ...Object.keys(fresh.columns)])) {
      const old = table.columns[name] ?? new Array(before).fill(null);
      table.columns[name] = old.concat(Object.hasOwn(fresh.columns, name) ? fresh.columns[name] : new Array(fresh.steps.length).fill(null));
    }
    const changed = fresh.from === 0 || fresh.steps.length > 0 || fresh.findings.length !== table.findings.length;
    Object.assign(table, { edition: fresh.edition, findings: fresh.findings });
    return changed;
  }

  async follow() {
    for (;;) {
      const living = this.runs.some((run) => run.living);
      await new Promise((done) => setTimeout(done, living ? FOLLOW_MS : REST_MS));
      if (document.hidden) continue;
      try {
        const runs = await this.source.get("runs");
        const changed = await Promise.all(runs.map((_, at) => this.readMetrics(at)));
        const differs = JSON.stringify(runs) !== JSON.stringify(this.runs);
        this.runs = runs;
        this.problem(null);
        if (differs) this.drawRuns();
        if (changed.some(Boolean) || differs) this.view?.update?.();
      } catch (error) {
        this.problem(error);
      }
    }
  }

  build() {
    this.problems = el("div", { class: "problem", role: "alert" });
    this.problems.hidden = true;
    this.runList = el("div", { class: "runs", role: "group", "aria-label": "runs" });
    this.tabs = el("div", { class: "tabs", role: "tablist", "aria-label": "views" },
      Object.entries(VIEWS).map(([name, [title]]) => el("button", {
        role: "tab", id: `tab-${name}`, "aria-controls": "view", "aria-selected": "false", onclick: () => this.show(name),
      }, title)));
    roving(this.tabs, "[role=tab]", { vertical: false });
    this.main = el("main", { id: "view", role: "tabpanel", tabindex: -1 });
    this.keys = new Keys(this);
    const skip = el("button", { class: "skip", onclick: () => this.view.focus() }, "Skip to the list, or the curves");
    fill(this.root, skip, el("header", {}, el("h1", {}, "atropos ", el("span", {}, "view")), this.tabs, this.keys.button, this.runList), this.problems, this.main, this.keys.dialog);
    this.drawRuns();
  }

  drawRuns() {
    const focused = document.activeElement?.closest?.(".run")?.dataset.run;
    fill(this.runList, this.runs.map((run, at) => el("label", { class: "run", "data-run": at, title: run.directory },
      this.runs.length > 1 && el("input", { type: "checkbox", checked: this.shown.has(at), onchange: (event) => this.toggle(at, event.target.checked) }),
      el("span", { class: `swatch s${at % 8}`, "aria-hidden": "true" }),
      el("span", { class: "name" }, run.name),
      el("span", { class: run.living ? "state living" : "state" }, standing(run)))));
    if (focused !== undefined) this.runList.querySelector(`[data-run="${focused}"] input`)?.focus();
    const notices = this.runs.flatMap((run) => run.notices.map((text) => `${run.name}: ${text}`));
    this.notices = notices;
  }

  toggle(at, is) {
    if (is) this.shown.add(at);
    else this.shown.delete(at);
    const { name, values } = this.here();
    this.go(name, values, true);
    this.view?.update?.(true);
  }

  problem(error) {
    this.problems.hidden = !error;
    fill(this.problems, error ? [error.message, error.remedy ? ` ${error.remedy}` : ""] : []);
  }

  // The address has all that was chosen, `#rollouts?step=3&outcome=wrong&row=7`: back, forward and reload work, and a place can be
  // kept and sent. Of the runs it has those that are shown, where some are not.
  go(name, values = {}, replace = false) {
    const kept = Object.entries(values).filter(([key, value]) => key !== "runs" && value !== undefined && value !== "");
    if (this.shown.size < this.runs.length) kept.push(["runs", [...this.shown].sort((a, b) => a - b).join(".")]);
    const query = new URLSearchParams(kept).toString();
    const hash = `#${name}${query ? `?${query}` : ""}`;
    if (replace) {
      history.replaceState(null, "", hash);
      return;
    }
    if (location.hash === hash) this.route();
    else location.hash = hash;
  }

  here() {
    const [wanted, query] = location.hash.slice(1).split("?");
    return { name: Object.hasOwn(VIEWS, wanted) ? wanted : "curves", values: Object.fromEntries(new URLSearchParams(query ?? "")) };
  }

  // A view as it was left.
  show(name) {
    this.go(name, this.views[name]?.values?.() ?? {});
  }

  route() {
    const { name, values } = this.here();
    if (values.token !== undefined) this.go(name, { ...values, token: undefined }, true); // an address with it, in a page that has it
    const shown = values.runs === undefined ? [...this.runs.keys()] : values.runs.split(".").filter(Boolean).map(Number).filter((at) => at in this.runs);
    if (shown.join() !== [...this.shown].sort((a, b) => a - b).join()) {
      this.shown = new Set(shown);
      this.drawRuns();
      this.view?.update?.(true);
    }
    for (const tab of this.tabs.children) {
      const is = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(is));
      tab.tabIndex = is ? 0 : -1;
    }
    this.main.setAttribute("aria-labelledby", `tab-${name}`);
    if (!this.views[name]) this.views[name] = new VIEWS[name][1](this);
    const view = this.views[name];
    if (this.view !== view) {
      this.view = view;
      fill(this.main, view.element);
    }
    view.enter(values);
  }
}

function standing(run) {
  const step = run.step === null ? "no step yet" : run.steps ? `step ${show(run.step)} of ${show(run.steps)}` : `step ${show(run.step)}`;
  return run.living ? `${step} · going on` : step;
}

async function begin() {
  const root = document.getElementById("app");
  try {
    await new App(root, openSource()).start();
  } catch (error) {
    fill(root, el("div", { class: "problem", role: "alert" }, error.message, " ", error.remedy ?? ""));
    document.documentElement.dataset.ready = "true";
    throw error;
  }
}

begin();
