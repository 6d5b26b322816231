// The held-out problems, before and after: which were won, which were lost, and what was said.

import { debounced, el, fill, show } from "./dom.js";
import { List } from "./list.js";

const CHANGES = { "": "all problems", won: "won", lost: "lost", right: "right in both", wrong: "wrong in both" };

export class Evaluations {
  constructor(app) {
    this.app = app;
    const pick = (label, change) => el("select", { "aria-label": label, onchange: change });
    this.before = pick("before", () => this.enter());
    this.after = pick("after", () => this.enter());
    this.change = el("select", { "aria-label": "change", onchange: () => this.filter() }, Object.entries(CHANGES).map(([value, text]) => el("option", { value }, text)));
    this.text = el("input", { type: "search", placeholder: "Search problems and replies", "aria-label": "Search problems and replies", oninput: debounced(() => this.filter()) });
    this.summary = el("div", { class: "summary" });
    this.count = el("span", { class: "count", role: "status" });
    this.list = new List({ label: "problems", rowHeight: 52, draw: (row, at) => this.drawRow(row, this.kept[at]), open: (at) => this.drawDetail(this.kept[at]) });
    this.detail = el("div", { class: "detail", tabindex: -1, role: "region", "aria-label": "one problem" });
    this.detail.addEventListener("keydown", (event) => { if (event.key === "Escape") this.back(); });
    this.panes = el("div", { class: "panes" }, this.list.element, this.detail);
    this.element = el("section", { class: "evaluations", "aria-label": "evaluation" },
      el("div", { class: "bar" }, el("label", {}, "before ", this.before), el("label", {}, "after ", this.after), this.text, this.change, this.count), this.summary, this.panes);
    this.kept = [];
  }

  options() {
    return this.app.runs.flatMap((run, at) => run.evaluations.map((step) => ({ at, step, name: `${this.app.runs.length > 1 ? `${run.name}, ` : ""}step ${step}`, value: `${at}/${step}` })));
  }

  update() {
    if (this.options().map((one) => one.value).join() !== this.offered) this.enter();
  }

  async enter() {
    const options = this.options();
    if (!options.length) {
      fill(this.summary, el("p", { class: "empty" }, "No evaluation is recorded: `evaluation.problems` of the run file says how many problems a run keeps for it."));
      this.list.set(0);
      return;
    }
    const key = options.map((one) => one.value).join();
    if (key !== this.offered) {
      const chosen = [this.before.value, this.after.value];
      for (const select of [this.before, this.after]) fill(select, options.map((one) => el("option", { value: one.value }, one.name)));
      const own = options.filter((one) => one.at === options[0].at); // the first run's own, before and after
      const followed = !this.offered || chosen[1] === this.newest;
      this.newest = own.at(-1).value;
      this.before.value = chosen[0] || own[0].value;
      this.after.value = followed ? this.newest : chosen[1];
      this.offered = key;
    }
    try {
      [this.first, this.second] = await Promise.all([this.before, this.after].map((select) => {
        const [run, step] = select.value.split("/");
        return this.app.source.get(`runs/${run}/evaluations/${step}`);
      }));
    } catch (error) {
      fill(this.summary, el("p", { class: "empty", role: "alert" }, error.message, " ", error.remedy ?? ""));
      this.list.set(0);
      return;
    }
    this.isGraded = this.graded();
    this.join();
    this.drawSummary();
    this.filter();
  }

  join() {
    const key = (table, at) => `${table.environment[at]}\n${table.task[at]}`;
    const before = new Map(this.first.task.map((_, at) => [key(this.first, at), at]));
    this.rows = this.second.task.map((_, at) => ({ after: at, before: before.get(key(this.second, at)) }));
  }

  // Accuracy, or where scores do not say what is right, the reward.
  share(table, at) {
    if (at === undefined) return null;
    return this.isGraded ? (table.total[at] ? (table.correct[at] ?? 0) / table.total[at] : null) : table.reward[at];
  }

  graded() {
    return [this.first, this.second].every((table) => table.correct.every((one, at) => one !== null || table.failed[at]) && table.correct.some((one) => one !== null));
  }

  figure(share) {
    return this.isGraded ? percent(share) : share === null ? "–" : show(share, 3);
  }

  changeOf({ before, after }) {
    const [from, to] = [this.share(this.first, before), this.share(this.second, after)];
    if (from === null || to === null) return "";
    return to > from ? "won" : to < from ? "lost" : to > 0 ? "right" : "wrong";
  }

  drawSummary() {
    const counts = { won: 0, lost: 0, right: 0, wrong: 0 };
    for (const row of this.rows) {
      const change = this.changeOf(row);
      if (change) counts[change] += 1;
    }
    const both = this.rows.filter((row) => row.before !== undefined);
    const mean = (table, side) => {
      const values = both.map((row) => this.share(table, row[side])).filter((one) => one !== null);
      return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
    };
    fill(this.summary,
      el("p", {}, el("span", { class: "soft" }, this.isGraded ? "accuracy " : "reward "),
        el("strong", { class: "figure" }, this.figure(mean(this.first, "before"))), " → ", el("strong", { class: "figure" }, this.figure(mean(this.second, "after"))),
        el("span", { class: "soft" }, ` of the ${show(both.length)} problems in both; `), el("span", { class: "good" }, `${show(counts.won)} won`), ", ", el("span", { class: "poor" }, `${show(counts.lost)} lost`),
        el("span", { class: "soft" }, `, ${show(counts.right)} right in both, ${show(counts.wrong)} wrong in both`)));
  }

  filter() {
    if (!this.rows) return;
    const wanted = this.text.value.trim().toLowerCase();
    const has = ({ before, after }) => !wanted || [this.second.task[after], this.second.question[after], this.second.reply[after], before === undefined ? "" : this.first.reply[before]].some((text) => text.toLowerCase().includes(wanted));
    this.kept = this.rows.filter((row) => (!this.change.value || this.changeOf(row) === this.change.value) && has(row));
    this.count.textContent = `${show(this.kept.length)} of ${show(this.rows.length)} problems`;
    this.list.set(this.kept.length);
    this.panes.classList.remove("opened");
    fill(this.detail, el("p", { class: "empty" }, "Choose a problem: Enter or a click opens it."));
  }

  drawRow(row, one) {
    const change = this.changeOf(one);
    row.append(
      el("span", { class: `reward ${change === "won" || change === "right" ? "good" : change ? "poor" : ""}` }, `${this.figure(this.share(this.first, one.before))} → ${this.figure(this.share(this.second, one.after))}`),
      el("span", { class: "main" }, el("span", { class: "preview" }, this.second.question[one.after].replaceAll(/\s+/g, " ").slice(0, 160)),
        el("span", { class: "under" }, `${this.second.task[one.after]}${change ? ` · ${CHANGES[change]}` : ""}`)));
  }

  drawDetail(one) {
    const side = (title, table, at) => el("article", {}, el("h3", {}, title),
      at === undefined ? el("p", { class: "empty" }, "not in this evaluation") : [
        el("p", { class: "soft" }, table.correct[at] !== null ? `${table.correct[at]} of ${table.total[at]} right, reward ${show(table.reward[at])}` : `reward ${show(table.reward[at])}`),
        table.failed[at] ? el("p", { class: "problem" }, table.failed[at]) : el("div", { class: "said" }, table.reply[at] || "(no text)")]);
    this.panes.classList.add("opened");
    fill(this.detail, el("button", { class: "back", onclick: () => this.back() }, "‹ List"),
      el("h2", {}, this.second.task[one.after], el("span", { class: "soft" }, ` ${this.second.environment[one.after]}`)),
      el("div", { class: "said question" }, this.second.question[one.after]),
      el("div", { class: "members two" }, side(`before: ${this.before.selectedOptions[0].textContent}`, this.first, one.before), side(`after: ${this.after.selectedOptions[0].textContent}`, this.second, one.after)));
    this.detail.focus({ preventScroll: true });
  }

  back() {
    this.panes.classList.remove("opened");
    this.list.box.focus();
  }
}

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(share > 0 && share < 1 ? 1 : 0)} %`;
}
