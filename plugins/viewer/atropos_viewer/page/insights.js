// What stands out among the rollouts of one step, each as a sentence with its figures; `flag` where a fault looks like this.

import { show } from "./dom.js";

const APART = 0.05; // nats a token that are no rounding
const LEAST = 8; // rollouts on each side, before their means are compared

// `allowed`: policy versions that rollouts may be behind, by the run file.
export function insights(table, allowed) {
  const rows = [...Array(table.count).keys()];
  const ended = rows.filter((at) => table.reward[at] !== null);
  const found = [];
  const groups = new Set(table.draw);
  const add = (name, text, flag = false) => found.push({ name, text, flag });

  add("rollouts", `${show(table.count)} in ${show(groups.size)} groups`);
  if (ended.length) add("reward", `mean ${show(mean(ended.map((at) => table.reward[at])), 3)}, from ${show(least(table.reward), 3)} to ${show(most(table.reward), 3)}`);

  const right = ended.filter((at) => table.correct[at] === true);
  const wrong = ended.filter((at) => table.correct[at] === false);
  if (right.length + wrong.length) add("right", `${percent(right.length, right.length + wrong.length)} of ${show(right.length + wrong.length)}`);
  if (right.length >= LEAST && wrong.length >= LEAST) {
    const [good, bad] = [right, wrong].map((list) => mean(list.map((at) => table.reward[at])));
    const spread = deviation(ended.map((at) => table.reward[at]));
    const same = good - bad < 0.25 * Math.max(spread, 1e-9);
    add("reward by outcome", `right ${show(good, 3)}, wrong ${show(bad, 3)}${same ? ": the reward does not follow the answer" : ""}`, same);
  }

  const sized = ended.filter((at) => table.tokens[at] !== null);
  if (sized.length >= 2 * LEAST) {
    const lengths = sized.map((at) => table.tokens[at]);
    const r = correlation(lengths, sized.map((at) => table.reward[at]));
    const own = correlation(lengths, beyondOutcome(table, sized)) ?? 0; // right answers may well be longer
    if (r !== null) add("reward and length", `correlation ${r.toFixed(2)}${Math.abs(own) > 0.7 ? `: at the same outcome, the ${own > 0 ? "longer" : "shorter"}, the more reward` : ""}`, Math.abs(own) > 0.7);
  }

  const cut = ended.filter((at) => nameOf(table.finish, at) === "length").length;
  if (cut) add("cut off", `${percent(cut, ended.length)} reached max_tokens`, cut > ended.length / 2);
  const failed = rows.filter((at) => nameOf(table.failed, at));
  if (failed.length) add("failed", `${show(failed.length)}; most often ${commonest(failed.map((at) => nameOf(table.failed, at)))}`, failed.length > table.count / 5);
  const out = new Map();
  for (const at of rows) if (nameOf(table.left_out, at)) out.set(table.draw[at], nameOf(table.left_out, at));
  if (out.size) add("left out of training", `${show(out.size)} of ${show(groups.size)} groups; most often ${commonest([...out.values()])}`);

  for (const { name, turned } of table.rescored ?? []) {
    const changed = new Set(rows.filter((at) => turned[at]).map((at) => table.draw[at]));
    add(`rescored ${name}`, `an advantage changes its sign in ${show(changed.size)} of ${show(groups.size)} groups`);
  }
  if (table.trained) {
    const counted = rows.filter((at) => table.trained[at] !== null && table.tokens[at] && !nameOf(table.left_out, at));
    const sampled = sum(counted.map((at) => table.tokens[at]));
    const trained = sum(counted.map((at) => table.trained[at]));
    if (sampled) add("trained tokens", `${percent(trained, sampled)} of the sampled ones${trained < sampled ? `: ${show(sampled - trained)} are masked` : ""}`, trained < 0.98 * sampled);
  }
  if (table.gap) {
    const known = rows.filter((at) => table.gap[at] !== null);
    if (known.length) {
      const average = mean(known.map((at) => table.gap[at]));
      add("trainer and engine", `${show(average, 2)} nats apart on average, ${show(most(table.gap_most), 2)} at most`, average > APART);
    }
  }
  const versions = rows.filter((at) => table.oldest[at] !== null);
  if (versions.length) {
    const [from, to] = [least(table.oldest), most(table.newest)];
    const behind = (table.policy_version ?? to) - from;
    add("policy versions", `${from === to ? `version ${from}` : `${from} to ${to}`}${behind > 0 ? `: ${from === to ? "" : "up to "}${behind} behind the policy of this step` : ""}`, behind > allowed);
  }
  for (const tool of table.tools ?? []) {
    const [text, count] = tool.commonest[0] ?? ["", 0];
    const same = tool.results >= LEAST && count > tool.results / 2;
    const often = count ? `; ${percent(count, tool.results)} of its results are “${text}”` : "; it gave no result";
    add(`tool ${tool.name}`, `${show(tool.calls)} calls in ${show(tool.rollouts)} rollouts${same || !count ? often : `, ${show(tool.distinct)} different results`}`, same || (tool.calls > 0 && !tool.results));
  }
  return found;
}

export function nameOf(coded, at) {
  return coded.names[coded.at[at]];
}

function sum(values) {
  return values.reduce((total, one) => total + one, 0);
}

function mean(values) {
  return sum(values) / values.length;
}

function deviation(values) {
  const middle = mean(values);
  return Math.sqrt(mean(values.map((one) => (one - middle) ** 2)));
}

// Each reward less the mean of the rewards of its outcome.
function beyondOutcome(table, rows) {
  const means = new Map([true, false, null].map((outcome) => {
    const own = rows.filter((at) => table.correct[at] === outcome);
    return [outcome, own.length ? mean(own.map((at) => table.reward[at])) : 0];
  }));
  return rows.map((at) => table.reward[at] - means.get(table.correct[at]));
}

function correlation(a, b) {
  const [sa, sb, ma, mb] = [deviation(a), deviation(b), mean(a), mean(b)];
  return sa > 1e-9 && sb > 1e-9 ? mean(a.map((one, i) => (one - ma) * (b[i] - mb))) / (sa * sb) : null;
}

export function least(values) {
  return values.reduce((found, one) => (one !== null && one < found ? one : found), Infinity);
}

export function most(values) {
  return values.reduce((found, one) => (one !== null && one > found ? one : found), -Infinity);
}

function commonest(values) {
  const counts = new Map();
  for (const one of values) counts.set(one, (counts.get(one) ?? 0) + 1);
  const [text, count] = [...counts].sort((a, b) => b[1] - a[1])[0];
  return `“${text.length > 160 ? `${text.slice(0, 160)}…` : text}” (${show(count)})`;
}

function percent(part, all) {
  const share = (100 * part) / all;
  return `${share > 0 && share < 10 ? share.toFixed(1) : Math.round(share)} %`;
}
