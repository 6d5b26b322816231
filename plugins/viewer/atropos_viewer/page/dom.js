// Elements from data. Text is only ever a text node: nothing that a model wrote is read as HTML.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
    else if (name === "value" || name === "checked" || name === "disabled") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
  return made;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(plain(child));
}

// A value of a record as text. `String` raises for an object that has a field called toString.
export function plain(value) {
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false).map(asNode));
}

export function show(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en-US");
  if (size >= 1e7 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

// One element of a group takes Tab; arrows move among them, Home and End to the ends.
export function roving(group, selector, { vertical = true, horizontal = true } = {}) {
  const all = () => [...group.querySelectorAll(selector)];
  const set = (chosen) => { for (const one of all()) one.tabIndex = one === chosen ? 0 : -1; };
  group.addEventListener("focusin", (event) => {
    const one = event.target.closest(selector);
    if (one && group.contains(one)) set(one);
  });
  group.addEventListener("keydown", (event) => {
    const list = all();
    const at = list.indexOf(event.target.closest(selector));
    if (at < 0 || event.target.matches("input, select, textarea")) return;
    const forward = (vertical && event.key === "ArrowDown") || (horizontal && event.key === "ArrowRight");
    const back = (vertical && event.key === "ArrowUp") || (horizontal && event.key === "ArrowLeft");
    const to = forward ? at + 1 : back ? at - 1 : event.key === "Home" ? 0 : event.key === "End" ? list.length - 1 : -1;
    if (to < 0 || to >= list.length) return;
    event.preventDefault();
    set(list[to]);
    list[to].focus();
  });
  const first = group.querySelector(`${selector}[aria-selected="true"], ${selector}[aria-current="true"]`) ?? group.querySelector(selector);
  if (first) set(first);
}

export function debounced(call, wait = 120) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), wait);
  };
}
