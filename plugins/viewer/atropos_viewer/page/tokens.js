// The tokens of a rollout, each coloured by one value; those that the loss does not count are grey.

import { el, fill, roving, show } from "./dom.js";

const CHUNK = 3000; // tokens that are drawn before more are requested
const VALUES = {
  advantage: ["advantage", "diverging"],
  turn_reward: ["turn reward", "diverging"],
  logprob: ["logprob", "falling"],
  difference: ["trainer − engine", "diverging"],
  entropy: ["entropy", "rising"],
  version: ["policy version", "version"],
  teacher: ["teacher logprob", "falling"],
};
// Of an update that was replayed and saved; they are only offered where there is one.
const REPLAYED = {
  replay_before: ["before", "falling"],
  replay_after: ["after", "falling"],
  replay_moved: ["moved", "diverging"],
  replay_changed: ["after, changed", "falling"],
  replay_changed_moved: ["moved, changed", "diverging"],
};
const ALL = { ...VALUES, ...REPLAYED };
const HUES = ["37,99,235", "217,119,6", "5,150,105", "147,51,234", "220,38,38", "8,145,178", "101,163,13", "190,24,93"];

export class TokenView {
  // `one.sequences`: of each branch its pieces of text, ids, sampled and trained, and a column a value where it is recorded.
  // `given`, `chosen()`: the colouring, the branch, from 1, and the name of a replay, that an address has.
  constructor(one, given, chosen) {
    this.newest = one.policy_version;
    this.sequences = one.sequences;
    this.chosen = chosen;
    this.at = Number(given?.branch) - 1 in one.sequences ? Number(given.branch) - 1 : 0;
    this.replay = this.replays.some((one) => one.name === given?.replay) ? given.replay : this.replays[0]?.name;
    this.merge();
    this.value = Object.hasOwn(ALL, given?.colour) && has(this.sequence[given.colour]) ? given.colour : Object.keys(VALUES).find((name) => this.sequences.some((sequence) => has(sequence[name]))) ?? "advantage";
    this.branches = el("div", { class: "segments", role: "radiogroup", "aria-label": "branch" });
    this.choices = el("div", { class: "segments", role: "radiogroup", "aria-label": "colour by" });
    this.replayed = el("div", { class: "segments", role: "radiogroup", "aria-label": "replay" });
    this.legend = el("div", { class: "legend" });
    this.info = el("div", { class: "token-info", role: "status" });
    this.text = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens: arrow keys read them one by one", onkeydown: (event) => this.key(event) });
    this.text.addEventListener("mouseover", (event) => { const token = event.target.closest(".tok"); if (token) this.read(Number(token.dataset.at)); });
    this.text.addEventListener("click", (event) => { const token = event.target.closest(".tok"); if (token) this.read(Number(token.dataset.at)); });
    this.element = el("section", { class: "token-view", "aria-label": "tokens" }, el("div", { class: "bar" }, el("h3", {}, "Tokens"), this.choices, this.branches, this.replayed), this.legend, this.text, this.info);
    this.drawBranches();
    this.drawReplays();
    this.drawChoices();
    this.draw();
  }

  get replays() {
    return this.sequences[this.at].replays ?? [];
  }

  // The columns of the branch, with those of the chosen replay.
  merge() {
    this.sequence = { ...this.sequences[this.at], ...this.replays.find((one) => one.name === this.replay) };
  }

  choose() {
    this.merge();
    this.chosen({ colour: this.value, branch: this.at ? String(this.at + 1) : undefined, replay: this.replay !== this.replays[0]?.name ? this.replay : undefined });
    this.drawChoices();
    this.draw();
  }

  drawBranches() {
    this.branches.hidden = this.sequences.length < 2;
    fill(this.branches, this.sequences.map((_, at) => radio(`branch ${at + 1}`, at === this.at, () => { this.at = at; this.choose(); this.drawBranches(); })));
    roving(this.branches, "[role=radio]");
  }

  drawReplays() {
    this.replayed.hidden = !this.replays.length;
    fill(this.replayed, this.replays.map(({ name }) => radio(`replay ${name}`, name === this.replay, () => { this.replay = name; if (!has(this.replays.find((one) => one.name === name)[this.value]) && Object.hasOwn(REPLAYED, this.value)) this.value = "replay_moved"; this.choose(); this.drawReplays(); })));
    roving(this.replayed, "[role=radio]");
  }

  drawChoices() {
    const offered = Object.entries(ALL).filter(([name]) => Object.hasOwn(VALUES, name) || has(this.sequence[name]));
    fill(this.choices, offered.map(([name, [title]]) => {
      const there = has(this.sequence[name]);
      return radio(title, name === this.value, () => { this.value = name; this.choose(); this.choices.querySelector("[aria-checked=true]").focus(); }, there ? null : "not recorded in this run", name);
    }));
    roving(this.choices, "[role=radio]:not([disabled])");
  }

  draw() {
    const { pieces, trained, sampled } = this.sequence;
    const scale = scaleOf(this.sequence, this.value, this.newest);
    this.index = undefined;
    this.spans = [];
    fill(this.text);
    const more = (from) => {
      const until = Math.min(pieces.length, from + CHUNK);
      const part = document.createDocumentFragment();
      for (let i = from; i < until; i++) {
        const span = document.createElement("span");
        span.className = `tok${trained[i] ? "" : sampled[i] ? " masked" : " prompt"}`;
        span.dataset.at = String(i);
        span.textContent = pieces[i] === "" ? "·" : pieces[i].replaceAll("\n", "↵\n");
        const value = this.sequence[this.value]?.[i];
        if (value !== null && value !== undefined) {
          span.dataset.value = String(value);
          // The grey of a masked token would not be read on a colour: it has a line of it.
          if (trained[i] || !sampled[i]) span.style.backgroundColor = scale.colour(value);
          else span.style.boxShadow = `inset 0 -3px ${scale.colour(value)}`;
        }
        this.spans.push(span);
        part.append(span);
      }
      this.text.append(part);
      if (until < pieces.length) {
        const button = el("button", { class: "link", onclick: () => { button.remove(); more(until); } }, `${show(pieces.length - until)} more tokens`);
        this.text.append(button);
      }
    };
    more(0);
    const masked = sampled.filter((is, i) => is && !trained[i]).length;
    fill(this.legend, scale.legend, el("span", { class: "key" }, el("span", { class: "tok prompt" }, "prompt")), el("span", { class: "key" }, el("span", { class: "tok masked" }, "masked"), masked ? ` ${show(masked)} of ${show(sampled.filter(Boolean).length)} sampled tokens are not trained` : " none of the sampled tokens"));
    fill(this.info, "Point at a token, or walk with the arrow keys.");
  }

  read(i) {
    if (!this.spans[i]) return;
    if (this.index !== undefined) this.spans[this.index]?.classList.remove("current");
    this.index = i;
    this.spans[i].classList.add("current");
    const sequence = this.sequence;
    const values = Object.entries(ALL).filter(([name]) => sequence[name]?.[i] !== null && sequence[name]?.[i] !== undefined).map(([name, [title]]) => `${title} ${show(sequence[name][i])}`);
    const state = sequence.trained[i] ? "trained" : sequence.sampled[i] ? "sampled, masked" : "prompt";
    fill(this.info, el("span", {}, `${i}: `), el("code", {}, JSON.stringify(sequence.pieces[i])), ` id ${sequence.ids[i]}, ${state}`, values.length ? `, ${values.join(", ")}` : "");
  }

  key(event) {
    const last = this.spans.length - 1;
    const to = { ArrowRight: (this.index ?? -1) + 1, ArrowLeft: (this.index ?? 1) - 1, Home: 0, End: last }[event.key];
    if (to === undefined || event.target !== this.text) return;
    event.preventDefault();
    this.read(Math.max(0, Math.min(last, to)));
    this.spans[this.index].scrollIntoView({ block: "nearest" });
  }
}

function radio(title, checked, choose, why, name) {
  return el("button", { role: "radio", "aria-checked": String(checked), tabindex: -1, disabled: Boolean(why), title: why, "data-name": name, onclick: choose }, title);
}

function has(column) {
  return Array.isArray(column) && column.some((one) => one !== null);
}

// What colour a value has, and the line that explains it.
function scaleOf(sequence, name, newest) {
  const [title, kind] = ALL[name];
  const known = (sequence[name] ?? []).filter((one) => one !== null);
  if (!known.length) return { colour: () => "transparent", legend: el("span", { class: "key" }, `${title}: not recorded`) };
  const low = known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  const swatch = (colour, text) => el("span", { class: "key" }, el("span", { class: "tok", style: { "background-color": colour } }, text));
  if (kind === "version") {
    const versions = [...new Set(known)].sort((a, b) => b - a);
    const colour = (value) => `rgba(${HUES[versions.indexOf(value) % HUES.length]},0.35)`;
    const behind = (value) => (newest !== null && newest > value ? `, ${newest - value} behind` : "");
    return { colour, legend: versions.slice(0, 8).map((value) => swatch(colour(value), `version ${value}${behind(value)}`)) };
  }
  if (kind === "diverging") {
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const colour = (value) => (value === 0 ? "transparent" : `rgba(${value > 0 ? "37,99,235" : "217,119,6"},${(0.08 + 0.5 * Math.min(1, Math.abs(value) / size)).toFixed(3)})`);
    return { colour, legend: [swatch(colour(-size), show(-size, 3)), swatch("transparent", "0"), swatch(colour(size), `+${show(size, 3)}`)] };
  }
  const strength = kind === "falling" ? (value) => (low < 0 ? value / low : 0) : (value) => (high > 0 ? value / high : 0);
  const colour = (value) => `rgba(147,51,234,${(0.04 + 0.5 * Math.max(0, Math.min(1, strength(value)))).toFixed(3)})`;
  return { colour, legend: [swatch(colour(kind === "falling" ? high : low), show(kind === "falling" ? high : low, 3)), swatch(colour(kind === "falling" ? low : high), show(kind === "falling" ? low : high, 3))] };
}
