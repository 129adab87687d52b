"use strict";
// Everything that moves on the page. Text from the data goes in as text, never as markup.
(() => {
const { items, names, findings, against, sheet } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { run: 0, view: "sure", pair: 0, asked: [], rival: 0, change: "mended", kind: null, point: -1 };

// --- small parts ------------------------------------------------------------------------------------------------------

function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// A name of unknown direction, kept from turning the text around it; a line may end after its underscores and dashes.
const named = (text) => make("bdi", {}, ...(text.match(/[^_/-]+[_/-]*|[_/-]+/g) ?? []).flatMap((part) => [part, make("wbr")]));
// A neighbour that is not on the page is known by its class alone: it stands as -1 less that class.
const labelOf = (item) => item < 0 ? -1 - item : items.label[item];
const className = (item) => items.classes[labelOf(item)];
// The file alone: its folders would leave no room for it, and the picture beside it tells them.
const fileName = (item) => make("div", { class: "soft" }, named(items.name[item].split("/").at(-1)));
const percent = (value) => value === null ? "–" : (100 * value).toFixed(1);

function choices(box, options, chosen, choose) {
  box.replaceChildren(...options.map(([value, text]) =>
    make("button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value, onclick: () => {
      choose(value);
      box.querySelector(`[data-value="${CSS.escape(value)}"]`)?.focus();
    } }, text)));
}

function picture(item) {
  const box = make("span", { class: sheet && item >= 0 ? "pic" : "pic none" });
  if (item < 0) box.append("not on this page");
  else if (sheet) {
    const [columns, rows] = sheet;
    const x = columns > 1 ? item % columns / (columns - 1) : 0, y = rows > 1 ? Math.floor(item / columns) / (rows - 1) : 0;
    box.style.backgroundPosition = `${100 * x}% ${100 * y}%`;
  } else box.append(named(className(item)));
  return box;
}

// One picture: kind is "query", "right" or "wrong"; choosing it makes it the query, if it is on the page.
function tile(item, kind, similarity) {
  const mark = { right: "✓", wrong: "✗" }[kind];
  const said = `${kind === "query" ? "query" : kind ?? "image"}: ${className(item)}, ${items.name[item] ?? "not on this page"}` + (similarity === undefined ? "" : `, similarity ${similarity.toFixed(2)}`);
  const note = make("span", { class: "note" });
  if (mark) note.append(make("b", {}, mark), ` ${similarity.toFixed(similarity > 0.98 ? 3 : 2)} `);
  note.append(named(className(item)));
  if (item < 0) return make("span", { class: `tile away ${kind}`, title: said }, picture(item), note);
  return make("button", { type: "button", class: `tile ${kind ?? ""}`, "aria-label": said, title: said, onclick: () => ask(item) }, picture(item), note);
}

function row(item, run, who) {
  const found = findings[run], line = make("div", { class: who && who !== "A" ? "row second" : "row" });
  if (who) line.append(make("span", { class: "who", title: names[run] }, who));
  line.append(tile(item, "query"));
  found.near[item].forEach((other, place) =>
    line.append(tile(other, labelOf(other) === labelOf(item) ? "right" : "wrong", found.similar[item][place] / 1000)));
  return line;
}

// A list that shows its first entries and more on demand.
function listing(box, button, entries, render, step) {
  let until = step;
  const draw = () => {
    box.replaceChildren(...entries.slice(0, until).flatMap(render));
    button.hidden = entries.length <= until;
  };
  button.onclick = () => { const from = box.children.length; until += step; draw(); box.children[from]?.querySelector("button")?.focus(); };
  draw();
}

// A table that sorts by any column and finds by name. A column: [title, value of a row, cell of a row].
function table(element, columns, rows, { search, more, sort = 0, down = false, first = 20 }) {
  let by = sort, falling = down, all = false;
  const compare = (a, b) => {
    const [x, y] = [columns[by][1](a), columns[by][1](b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return falling ? -order : order;
  };
  const draw = () => {
    const wanted = (search?.value ?? "").trim().toLowerCase();
    const found = rows.filter((one) => !wanted || columns.some(([, value]) => typeof value(one) === "string" && value(one).toLowerCase().includes(wanted))).sort(compare);
    const head = make("tr", {}, ...columns.map(([title], at) =>
      make("th", { scope: "col", class: rows.length && typeof columns[at][1](rows[0]) === "string" ? "name" : null, "aria-sort": at === by ? (falling ? "descending" : "ascending") : null },
        make("button", { type: "button", onclick: () => {
          falling = at === by ? !falling : rows.length > 0 && typeof columns[at][1](rows[0]) === "number";
          by = at;
          draw();
          element.querySelectorAll("th button")[at].focus();
        } }, title))));
    const shown = all ? found : found.slice(0, first);
    const body = shown.map((one) => make("tr", {}, ...columns.map(([, value, cell], at) =>
      make(at ? "td" : "th", { scope: at ? null : "row", class: typeof value(one) === "string" ? "name" : null }, cell ? cell(one) : String(value(one) ?? "–")))));
    element.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
    if (more) {
      more.hidden = all || found.length <= first;
      more.textContent = `Show all ${found.length}`;
    }
  };
  if (search) search.oninput = draw;
  if (more) more.onclick = () => { all = true; draw(); };
  draw();
}

const classCell = (index) => make("button", { type: "button", class: "link", onclick: () => askClass(index) }, named(items.classes[index]));

// --- the gallery ------------------------------------------------------------------------------------------------------

const VIEWS = { sure: "sure and wrong", hardest: "hardest", random: "random", pair: "confused pair" };
const SAID = {
  sure: "The nearest neighbour is of another class, and nearer than the nearest of the right class by most.",
  hardest: "The fewest of the right class near: the lowest MAP@R.",
  random: "Drawn at random.",
  pair: "Queries of one class whose nearest neighbour is of the other.",
};

function ask(item) {
  if (state.view !== "asked") state.asked = [];
  state.view = "asked";
  state.asked = [item, ...state.asked.filter((other) => other !== item)].slice(0, 20);
  gallery();
  byId("gallery").scrollIntoView({ block: "start" });
  byId("shown").querySelector(".tile")?.focus({ preventScroll: true });
}

function askClass(index) {
  state.view = "class";
  byId("class-choice").value = items.classes[index];
  gallery();
  byId("gallery").scrollIntoView({ block: "start" });
  byId("class-choice").focus({ preventScroll: true });
}

function gallery() {
  const found = findings[state.run], wanted = byId("class-choice");
  const options = Object.entries(VIEWS).filter(([view]) => view === "pair" ? found.pairs.length : found.views[view].length);
  if (!["asked", "class"].includes(state.view) && !options.some(([view]) => view === state.view)) state.view = options[0][0];
  if (state.view === "asked") options.push(["asked", "your queries"]);
  if (state.view !== "class") wanted.value = "";
  choices(byId("views"), options, state.view, (view) => { state.view = view; gallery(); });
  byId("pair-choice").hidden = state.view !== "pair";
  const index = items.classes.indexOf(wanted.value);
  let list = [], said = SAID[state.view];
  if (state.view === "pair") {
    const select = byId("pair");
    select.replaceChildren(...found.pairs.map((pair, at) =>
      make("option", { value: at, selected: at === state.pair }, `${items.classes[pair.class]} → ${items.classes[pair.taken_for]} (${pair.count})`)));
    state.pair = Math.min(state.pair, found.pairs.length - 1);
    const pair = found.pairs[state.pair];
    list = pair.items;
    if (list.length < pair.count) said += ` ${list.length} of the ${pair.count} are listed.`;
  } else if (state.view === "asked") {
    list = state.asked;
    said = "Pictures that you chose, the last one first.";
  } else if (state.view === "class") {
    list = items.label.flatMap((label, item) => label === index ? [item] : []);
    const all = items.sizes[index];
    said = index < 0 ? "No class of that name." : list.length === all ? `All ${all} images of this class.` : `${list.length} of the ${all} images of this class; the others are not on this page.`;
  } else list = found.views[state.view];
  byId("said").textContent = said;
  listing(byId("shown"), byId("shown-more"), list, (item) => [row(item, state.run)], 8);
}

// Arrow keys walk over the pictures of a box.
function arrows(box) {
  box.addEventListener("keydown", (event) => {
    const here = event.target.closest(".tile");
    if (!here || !event.key.startsWith("Arrow")) return;
    const rows = [...box.querySelectorAll(".row")], line = here.closest(".row"), tiles = [...line.querySelectorAll("button.tile")];
    const [at, place] = [rows.indexOf(line), tiles.indexOf(here)];
    const next = { ArrowRight: tiles[place + 1], ArrowLeft: tiles[place - 1],
      ArrowDown: rows[at + 1]?.querySelectorAll("button.tile")[place], ArrowUp: rows[at - 1]?.querySelectorAll("button.tile")[place] }[event.key];
    if (next) { event.preventDefault(); next.focus(); }
  });
}

// --- the map ----------------------------------------------------------------------------------------------------------

const map = { points: [], order: [], x: [], y: [] };

function showMap(kind) {
  const kinds = Object.keys(findings[state.run].map.kinds);
  state.kind = kinds.includes(kind) ? kind : kinds[kinds.length - 1];
  choices(byId("kinds"), kinds.map((each) => [each, each]), state.kind, showMap);
  drawMap();
}

function drawMap() {
  const canvas = byId("canvas"), found = findings[state.run], { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const points = found.map.kinds[state.kind], reach = (axis) => Math.max(1, ...points.map((each) => 2 * Math.abs(each[axis] - 500)));
  const unit = Math.min((width - 28) / reach(0), (height - 28) / reach(1));
  map.points = found.map.items;
  map.x = points.map(([x]) => width / 2 + (x - 500) * unit);
  map.y = points.map(([, y]) => height / 2 - (y - 500) * unit);
  map.order = points.map((_, at) => at).sort((a, b) => map.x[a] - map.x[b]);
  const wanted = items.classes.indexOf(byId("map-class").value);
  const bright = state.point >= 0 ? items.label[map.points[state.point]] : wanted;
  const right = style.getPropertyValue("--right"), wrong = style.getPropertyValue("--wrong");
  const size = points.length > 1500 ? 2 : 3;
  const draw = (at, radius) => {
    const item = map.points[at];
    const good = labelOf(found.near[item][0]) === labelOf(item);
    pen.fillStyle = pen.strokeStyle = good ? right : wrong;
    pen.beginPath();
    if (good) { pen.arc(map.x[at], map.y[at], radius, 0, 7); pen.fill(); }
    else {
      pen.moveTo(map.x[at] - radius, map.y[at] - radius); pen.lineTo(map.x[at] + radius, map.y[at] + radius);
      pen.moveTo(map.x[at] - radius, map.y[at] + radius); pen.lineTo(map.x[at] + radius, map.y[at] - radius);
      pen.stroke();
    }
  };
  pen.lineWidth = 1.4;
  pen.globalAlpha = bright >= 0 ? 0.16 : 0.65;
  points.forEach((_, at) => { if (items.label[map.points[at]] !== bright) draw(at, size); });
  pen.globalAlpha = 1;
  pen.lineWidth = 2.4;
  points.forEach((_, at) => { if (items.label[map.points[at]] === bright) draw(at, size + 2); });
  if (state.point >= 0) {
    pen.strokeStyle = style.getPropertyValue("--ink");
    pen.beginPath();
    pen.arc(map.x[state.point], map.y[state.point], size + 7, 0, 7);
    pen.stroke();
  }
}

function point(at) {
  if (at === state.point) return;
  state.point = at;
  drawMap();
  const tip = byId("tip");
  tip.hidden = at < 0;
  if (at < 0) return;
  tip.replaceChildren(tile(map.points[at]));
  tip.firstChild.tabIndex = -1;
  const width = byId("canvas").clientWidth, height = byId("canvas").clientHeight;
  tip.style.left = `${Math.min(Math.max(map.x[at] + 14, 4), width - 112)}px`;
  tip.style.top = `${map.y[at] > height - 170 ? map.y[at] - 160 : map.y[at] + 14}px`;
}

function nearest(event) {
  const box = byId("canvas").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  let best = -1, least = 20 ** 2;
  map.x.forEach((px, at) => {
    const far = (px - x) ** 2 + (map.y[at] - y) ** 2;
    if (far < least) [best, least] = [at, far];
  });
  return best;
}

function startMap() {
  const canvas = byId("canvas");
  canvas.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") point(nearest(event)); });
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(-1); });
  canvas.addEventListener("click", (event) => {
    const at = nearest(event), again = at === state.point;
    point(at);
    // A finger has no way to hover: its first touch shows, its second chooses.
    if (at >= 0 && (event.pointerType === "mouse" || again)) ask(map.points[at]);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      event.preventDefault();
      const count = map.order.length, place = map.order.indexOf(state.point);
      point(map.order[place < 0 ? (step > 0 ? 0 : count - 1) : (place + step + count) % count]);
    } else if (event.key === "Enter" && state.point >= 0) ask(map.points[state.point]);
    else if (event.key === "Escape") point(-1);
  });
  canvas.addEventListener("blur", () => point(-1));
  byId("map-class").addEventListener("input", drawMap);
  new ResizeObserver(drawMap).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}

// --- tables and lists -------------------------------------------------------------------------------------------------

function classes() {
  table(byId("class-table"), [
    ["class", (one) => items.classes[one.class], (one) => classCell(one.class)],
    ["images", (one) => one.queries],
    ["R@1", (one) => one["R@1"], (one) => percent(one["R@1"])],
    ["MAP@R", (one) => one["MAP@R"], (one) => percent(one["MAP@R"])],
    ["most taken for", (one) => one.taken_for === null ? "" : items.classes[one.taken_for],
      (one) => one.taken_for === null ? "" : make("span", {}, named(items.classes[one.taken_for]), ` (${one.times})`)],
  ], findings[state.run].classes, { search: byId("class-search"), more: byId("class-more"), sort: 2 });
}

function confusions() {
  const { pairs, hubs } = findings[state.run];
  table(byId("pair-table"), [
    ["class", (one) => items.classes[one.class], (one) => classCell(one.class)],
    ["taken for", (one) => items.classes[one.taken_for], (one) => classCell(one.taken_for)],
    ["queries", (one) => one.count, (one) => make("button", { type: "button", class: "link", onclick: () => {
      state.view = "pair";
      state.pair = pairs.indexOf(one);
      gallery();
      byId("gallery").scrollIntoView({ block: "start" });
      byId("pair").focus({ preventScroll: true });
    } }, String(one.count))],
    ["of the class, %", (one) => one.share, (one) => percent(one.share)],
  ], pairs, { sort: 2, down: true, first: 30 });
  byId("hubs").replaceChildren(...hubs.slice(0, 12).map(({ item, lists, wrong }) =>
    make("div", { class: "card" }, tile(item), make("div", { class: "about" },
      make("div", {}, named(className(item))), make("div", {}, `in ${lists} lists, ${wrong} of another class`), fileName(item)))));
}

function suspects() {
  const found = findings[state.run].suspects;
  byId("suspect-said").textContent = found.why ? found.why :
    `About ${percent(found.share)} % of the labels of these images look wrong; among the first 100, ${found.expected} are to be expected. Look before you change one: a hard image looks like a wrong label.`;
  listing(byId("suspect-list"), byId("suspect-more"), found.rows, (one) => [make("div", { class: "card" }, tile(one.item),
    make("div", { class: "about" }, make("div", {}, "is ", named(className(one.item))), make("div", {}, "or ", named(items.classes[one.suggested]), "?"),
      make("div", {}, `chance of being wrong ${percent(one.probability)} %`), fileName(one.item)))], 12);
}

function copies() {
  listing(byId("copies"), byId("copies-more"), findings[0].copies.rows, ({ items: [a, b], similarity, exact }) =>
    [make("div", { class: "card" }, tile(a), tile(b), make("div", { class: "about" },
      make("div", {}, named(className(a))), make("div", {}, items.label[a] === items.label[b] ? "same class" : named(className(b))),
      make("div", {}, exact ? "identical" : `cosine ${similarity.toFixed(3)}`)))], 12);
}

// --- runs against each other --------------------------------------------------------------------------------------

function rivals() {
  const one = against[state.rival], second = state.rival + 1, letter = names[second].split(":")[0];
  const options = [["mended", `mended by ${letter} (${one.mended.count})`], ["broken", `broken by ${letter} (${one.broken.count})`]];
  choices(byId("changes"), options, state.change, (change) => { state.change = change; rivals(); });
  listing(byId("changed"), byId("changed-more"), one[state.change].items, (item) => [row(item, 0, "A"), row(item, second, letter)], 5);
  table(byId("gain-table"), [
    ["class", (each) => items.classes[each.class], (each) => classCell(each.class)],
    ["images", (each) => each.queries],
    ["A, R@1", (each) => each.before, (each) => percent(each.before)],
    [`${letter}, R@1`, (each) => each.after, (each) => percent(each.after)],
    ["gain", (each) => each.gain, (each) => `${each.gain > 0 ? "+" : ""}${percent(each.gain)}`],
  ], one.classes, { search: byId("gain-search"), more: byId("gain-more"), sort: 4, down: true, first: 12 });
}

function showRun(run) {
  if (state.point >= 0) point(-1);
  state.run = run;
  if (names.length > 1) choices(byId("runs"), names.map((name, at) => [String(at), name]), String(run), (at) => showRun(Number(at)));
  document.querySelectorAll(".of-run").forEach((element) => { element.hidden = Number(element.dataset.run) !== run; });
  if (!items) return;
  gallery();
  showMap(state.kind);
  classes();
  confusions();
  suspects();
}

if (items) {
  byId("class-names").append(...items.classes.map((name) => make("option", { value: name })));
  byId("pair").onchange = (event) => { state.pair = Number(event.target.value); gallery(); };
  byId("class-choice").oninput = (event) => { state.view = event.target.value ? "class" : "sure"; gallery(); };
  arrows(byId("shown"));
  startMap();
  copies();
  if (against.length) {
    arrows(byId("changed"));
    if (byId("rival")) byId("rival").onchange = (event) => { state.rival = Number(event.target.value); rivals(); };
    rivals();
  }
}
showRun(0);
})();
