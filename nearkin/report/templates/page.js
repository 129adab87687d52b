"use strict";
// The interactive parts of the page. Text from the data is inserted as text, never as markup.
(() => {
const { items, names, analyses, comparisons, sheet } = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { run: 0, view: "confident_errors", pair: 0, selected: [], comparison: 0, change: "fixed", projection: null, point: -1 };

// --- building blocks --------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Names may be right-to-left: bdi isolates them from the text around. Lines may break after underscores and dashes.
const nameText = (text) => make("bdi", {}, ...(text.match(/[^_/-]+[_/-]*|[_/-]+/g) ?? []).flatMap((part) => [part, make("wbr")]));
// A neighbour that is not on the page is stored as -1 - its class.
const labelOf = (item) => item < 0 ? -1 - item : items.labels[item];
const className = (item) => items.class_names[labelOf(item)];
const fileName = (item) => make("div", { class: "soft" }, nameText(items.names[item].split("/").at(-1)));
const percent = (value) => value === null ? "–" : (100 * value).toFixed(1);

function choices(box, options, current, choose) {
  box.replaceChildren(...options.map(([value, text]) =>
    make("button", { type: "button", "aria-pressed": String(value === current), "data-value": value, onclick: () => {
      choose(value);
      box.querySelector(`[data-value="${CSS.escape(value)}"]`)?.focus();
    } }, text)));
}

function thumbnail(item) {
  const box = make("span", { class: sheet && item >= 0 ? "thumb" : "thumb none" });
  if (item < 0) box.append("not on this page");
  else if (sheet) {
    const [columns, rows] = sheet;
    const x = columns > 1 ? item % columns / (columns - 1) : 0, y = rows > 1 ? Math.floor(item / columns) / (rows - 1) : 0;
    box.style.backgroundPosition = `${100 * x}% ${100 * y}%`;
  } else box.append(nameText(className(item)));
  return box;
}

// An image with its class; role is "query", "right", "wrong" or undefined. Clicking an image on the page makes it the query.
function tile(item, role, similarity) {
  const mark = { right: "✓", wrong: "✗" }[role];
  const label = `${role ?? "image"}: ${className(item)}, ${items.names[item] ?? "not on this page"}` + (similarity === undefined ? "" : `, similarity ${similarity.toFixed(2)}`);
  const note = make("span", { class: "note" });
  if (mark) note.append(make("b", {}, mark), ` ${similarity.toFixed(3)} `);
  note.append(nameText(className(item)));
  if (item < 0) return make("span", { class: `tile absent ${role}`, title: label }, thumbnail(item), note);
  return make("button", { type: "button", class: `tile ${role ?? ""}`, "aria-label": label, title: label, onclick: () => selectQuery(item) }, thumbnail(item), note);
}

function queryRow(item, run, letter) {
  const { neighbours, similarities } = analyses[run], row = make("div", { class: letter && letter !== "A" ? "row second" : "row" });
  if (letter) row.append(make("span", { class: "run-letter", title: names[run] }, letter));
  row.append(tile(item, "query"));
  neighbours[item].forEach((other, rank) =>
    row.append(tile(other, labelOf(other) === labelOf(item) ? "right" : "wrong", similarities[item][rank] / 1000)));
  return row;
}

// A list that shows `step` entries at a time.
function pagedList(box, button, entries, render, step) {
  let count = step;
  const draw = () => {
    box.replaceChildren(...entries.slice(0, count).flatMap(render));
    button.hidden = entries.length <= count;
  };
  button.onclick = () => { const first = box.children.length; count += step; draw(); box.children[first]?.querySelector("button")?.focus(); };
  draw();
}

// A table that can be sorted by each column and searched. A column: [title, value of a row, cell of a row].
function table(element, columns, rows, { search, more, sort = 0, descending = false, limit = 20 }) {
  let sortColumn = sort, showAll = false;
  const isText = (column) => rows.length > 0 && typeof columns[column][1](rows[0]) === "string";
  const compare = (a, b) => {
    const [x, y] = [columns[sortColumn][1](a), columns[sortColumn][1](b)];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return descending ? -order : order;
  };
  const sortBy = (column) => {
    descending = column === sortColumn ? !descending : rows.length > 0 && typeof columns[column][1](rows[0]) === "number";
    sortColumn = column;
    draw();
    element.querySelectorAll("th button")[column].focus();
  };
  const draw = () => {
    const text = (search?.value ?? "").trim().toLowerCase();
    const matches = (row) => !text || columns.some(([, value]) => typeof value(row) === "string" && value(row).toLowerCase().includes(text));
    const found = rows.filter(matches).sort(compare);
    const head = make("tr", {}, ...columns.map(([title], i) =>
      make("th", { scope: "col", class: isText(i) ? "name" : null, "aria-sort": i === sortColumn ? (descending ? "descending" : "ascending") : null },
        make("button", { type: "button", onclick: () => sortBy(i) }, title))));
    const body = (showAll ? found : found.slice(0, limit)).map((row) => make("tr", {}, ...columns.map(([, value, cell], i) =>
      make(i ? "td" : "th", { scope: i ? null : "row", class: typeof value(row) === "string" ? "name" : null }, cell ? cell(row) : String(value(row) ?? "–")))));
    element.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
    if (more) {
      more.hidden = showAll || found.length <= limit;
      more.textContent = `Show all ${found.length}`;
    }
  };
  if (search) search.oninput = draw;
  if (more) more.onclick = () => { showAll = true; draw(); };
  draw();
}

const classCell = (index) => make("button", { type: "button", class: "link", onclick: () => selectClass(index) }, nameText(items.class_names[index]));

// --- retrieval examples -----------------------------------------------------------------------------------------------

const VIEWS = { confident_errors: "Confident errors", hardest: "Hardest queries", random: "Random queries", pair: "Confused classes" };
const NOTES = {
  confident_errors: "The nearest neighbour is of another class; sorted by its margin over the nearest of the same class.",
  hardest: "Queries with the lowest MAP@R.",
  random: "A random sample.",
  pair: "Queries of one class whose nearest neighbour is of the other class.",
};

function selectQuery(item) {
  if (state.view !== "selected") state.selected = [];
  state.view = "selected";
  state.selected = [item, ...state.selected.filter((other) => other !== item)].slice(0, 20);
  showExamples();
  byId("examples").scrollIntoView({ block: "start" });
  byId("query-rows").querySelector(".tile")?.focus({ preventScroll: true });
}

function selectClass(index) {
  state.view = "class";
  byId("class-choice").value = items.class_names[index];
  showExamples();
  byId("examples").scrollIntoView({ block: "start" });
  byId("class-choice").focus({ preventScroll: true });
}

function showExamples() {
  const { confused_pairs: pairs, example_queries: queries } = analyses[state.run], classChoice = byId("class-choice");
  const options = Object.entries(VIEWS).filter(([view]) => view === "pair" ? pairs.length : queries[view].length);
  if (!["selected", "class"].includes(state.view) && !options.some(([view]) => view === state.view)) state.view = options[0][0];
  if (state.view === "selected") options.push(["selected", "Selected images"]);
  if (state.view !== "class") classChoice.value = "";
  choices(byId("query-choices"), options, state.view, (view) => { state.view = view; showExamples(); });
  byId("pair-choice").hidden = state.view !== "pair";
  const index = items.class_names.indexOf(classChoice.value);
  let list = [], note = NOTES[state.view];
  if (state.view === "pair") {
    const select = byId("pair");
    select.replaceChildren(...pairs.map((pair, i) =>
      make("option", { value: i, selected: i === state.pair }, `${items.class_names[pair.class]} → ${items.class_names[pair.confused_with]} (${pair.count})`)));
    state.pair = Math.min(state.pair, pairs.length - 1);
    const pair = pairs[state.pair];
    list = pair.items;
    if (list.length < pair.count) note += ` ${list.length} of ${pair.count} are listed.`;
  } else if (state.view === "selected") {
    list = state.selected;
    note = "Images that you selected, the latest first.";
  } else if (state.view === "class") {
    list = items.labels.flatMap((label, item) => label === index ? [item] : []);
    const total = items.class_sizes[index];
    note = index < 0 ? "No class with this name." : list.length === total ? `All ${total} images of this class.` : `${list.length} of the ${total} images of this class; the others are not on this page.`;
  } else list = queries[state.view];
  byId("query-note").textContent = note;
  pagedList(byId("query-rows"), byId("query-more"), list, (item) => [queryRow(item, state.run)], 8);
}

// Arrow keys move between the images of a box.
function addArrowKeys(box) {
  box.addEventListener("keydown", (event) => {
    const current = event.target.closest(".tile");
    if (!current || !event.key.startsWith("Arrow")) return;
    const tilesOf = (row) => row ? [...row.querySelectorAll("button.tile")] : [];
    const rows = [...box.querySelectorAll(".row")], row = rows.indexOf(current.closest(".row"));
    const tiles = tilesOf(rows[row]), column = tiles.indexOf(current);
    const next = { ArrowRight: tiles[column + 1], ArrowLeft: tiles[column - 1],
      ArrowDown: tilesOf(rows[row + 1])[column], ArrowUp: tilesOf(rows[row - 1])[column] }[event.key];
    if (next) { event.preventDefault(); next.focus(); }
  });
}

// --- embedding map ----------------------------------------------------------------------------------------------------

const map = { items: [], order: [], x: [], y: [] };

function showMap(projection) {
  const available = Object.keys(analyses[state.run].map.projections);
  state.projection = available.includes(projection) ? projection : available[available.length - 1];
  choices(byId("projection-choices"), available.map((name) => [name, name]), state.projection, showMap);
  drawMap();
}

function drawMap() {
  const canvas = byId("canvas"), { map: stored, neighbours } = analyses[state.run], { clientWidth: width, clientHeight: height } = canvas;
  const pixelRatio = window.devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  canvas.width = width * pixelRatio;
  canvas.height = height * pixelRatio;
  const context = canvas.getContext("2d");
  context.scale(pixelRatio, pixelRatio);
  const points = stored.projections[state.projection], extent = (axis) => Math.max(1, ...points.map((point) => 2 * Math.abs(point[axis] - 500)));
  const scale = Math.min((width - 28) / extent(0), (height - 28) / extent(1));
  map.items = stored.items;
  map.x = points.map(([x]) => width / 2 + (x - 500) * scale);
  map.y = points.map(([, y]) => height / 2 - (y - 500) * scale);
  map.order = points.map((_, i) => i).sort((a, b) => map.x[a] - map.x[b]);
  const chosen = items.class_names.indexOf(byId("map-class").value);
  const highlighted = state.point >= 0 ? items.labels[map.items[state.point]] : chosen;
  const rightColour = style.getPropertyValue("--right"), wrongColour = style.getPropertyValue("--wrong");
  const size = points.length > 1500 ? 2 : 3;
  const drawPoint = (i, radius) => {
    const item = map.items[i], right = labelOf(neighbours[item][0]) === labelOf(item);
    context.fillStyle = context.strokeStyle = right ? rightColour : wrongColour;
    context.beginPath();
    if (right) { context.arc(map.x[i], map.y[i], radius, 0, 7); context.fill(); }
    else {
      context.moveTo(map.x[i] - radius, map.y[i] - radius); context.lineTo(map.x[i] + radius, map.y[i] + radius);
      context.moveTo(map.x[i] - radius, map.y[i] + radius); context.lineTo(map.x[i] + radius, map.y[i] - radius);
      context.stroke();
    }
  };
  context.lineWidth = 1.4;
  context.globalAlpha = highlighted >= 0 ? 0.16 : 0.65;
  points.forEach((_, i) => { if (items.labels[map.items[i]] !== highlighted) drawPoint(i, size); });
  context.globalAlpha = 1;
  context.lineWidth = 2.4;
  points.forEach((_, i) => { if (items.labels[map.items[i]] === highlighted) drawPoint(i, size + 2); });
  if (state.point >= 0) {
    context.strokeStyle = style.getPropertyValue("--ink");
    context.beginPath();
    context.arc(map.x[state.point], map.y[state.point], size + 7, 0, 7);
    context.stroke();
  }
}

function showPoint(index) {
  if (index === state.point) return;
  state.point = index;
  drawMap();
  const tip = byId("tip");
  tip.hidden = index < 0;
  if (index < 0) return;
  tip.replaceChildren(tile(map.items[index]));
  tip.firstChild.tabIndex = -1;
  const { clientWidth: width, clientHeight: height } = byId("canvas");
  tip.style.left = `${Math.min(Math.max(map.x[index] + 14, 4), width - 112)}px`;
  tip.style.top = `${map.y[index] > height - 170 ? map.y[index] - 160 : map.y[index] + 14}px`;
}

function nearestPoint(event) {
  const box = byId("canvas").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  let nearest = -1, minDistance = 20 ** 2;
  map.x.forEach((px, i) => {
    const distance = (px - x) ** 2 + (map.y[i] - y) ** 2;
    if (distance < minDistance) [nearest, minDistance] = [i, distance];
  });
  return nearest;
}

function startMap() {
  const canvas = byId("canvas");
  canvas.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") showPoint(nearestPoint(event)); });
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") showPoint(-1); });
  canvas.addEventListener("click", (event) => {
    const index = nearestPoint(event), again = index === state.point;
    showPoint(index);
    // Touch screens cannot hover: the first touch shows an image, the second selects it.
    if (index >= 0 && (event.pointerType === "mouse" || again)) selectQuery(map.items[index]);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) {
      event.preventDefault();
      const count = map.order.length, position = map.order.indexOf(state.point);
      showPoint(map.order[position < 0 ? (step > 0 ? 0 : count - 1) : (position + step + count) % count]);
    } else if (event.key === "Enter" && state.point >= 0) selectQuery(map.items[state.point]);
    else if (event.key === "Escape") showPoint(-1);
  });
  canvas.addEventListener("blur", () => showPoint(-1));
  byId("map-class").addEventListener("input", drawMap);
  new ResizeObserver(drawMap).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}

// --- tables and cards -------------------------------------------------------------------------------------------------

const card = (tiles, ...lines) => make("div", { class: "card" }, ...tiles, make("div", { class: "about" }, ...lines));
const line = (...parts) => make("div", {}, ...parts);

function showClasses() {
  table(byId("class-table"), [
    ["class", (row) => items.class_names[row.class], (row) => classCell(row.class)],
    ["queries", (row) => row.queries],
    ["R@1", (row) => row["R@1"], (row) => percent(row["R@1"])],
    ["MAP@R", (row) => row["MAP@R"], (row) => percent(row["MAP@R"])],
    ["most confused with", (row) => row.confused_with === null ? "" : items.class_names[row.confused_with],
      (row) => row.confused_with === null ? "" : make("span", {}, nameText(items.class_names[row.confused_with]), ` (${row.count})`)],
  ], analyses[state.run].classes, { search: byId("class-search"), more: byId("class-more"), sort: 2 });
}

function showConfusedPairs() {
  const pairs = analyses[state.run].confused_pairs;
  const showPair = (pair) => {
    state.view = "pair";
    state.pair = pairs.indexOf(pair);
    showExamples();
    byId("examples").scrollIntoView({ block: "start" });
    byId("pair").focus({ preventScroll: true });
  };
  table(byId("pair-table"), [
    ["class", (pair) => items.class_names[pair.class], (pair) => classCell(pair.class)],
    ["confused with", (pair) => items.class_names[pair.confused_with], (pair) => classCell(pair.confused_with)],
    ["queries", (pair) => pair.count, (pair) => make("button", { type: "button", class: "link", onclick: () => showPair(pair) }, String(pair.count))],
    ["% of the class", (pair) => pair.share, (pair) => percent(pair.share)],
  ], pairs, { more: byId("pair-more"), sort: 2, descending: true, limit: 12 });
}

function showHubs() {
  byId("hub-cards").replaceChildren(...analyses[state.run].hubs.slice(0, 12).map(({ item, occurrences, wrong_class }) =>
    card([tile(item)], line(nameText(className(item))), line(`neighbour of ${occurrences} queries`), line(`${wrong_class} of another class`), fileName(item))));
}

function showLabelErrors() {
  const { unavailable, share, expected, suspects } = analyses[state.run].label_errors;
  byId("label-error-note").textContent = unavailable ? unavailable : expected === 0 ?
    "No label errors are expected: the candidates below are only the least certain labels." :
    `An estimated ${percent(share)} % of the labels are wrong; about ${expected} errors are expected among the first 100 candidates. Check each image before you change its label: hard images look like label errors.`;
  pagedList(byId("label-error-cards"), byId("label-error-more"), suspects, ({ item, suggested, probability }) => [card([tile(item)],
    line("label: ", nameText(className(item))), line("suggested: ", nameText(items.class_names[suggested])),
    line(`error probability ${percent(probability)} %`), fileName(item))], 12);
}

function showDuplicates() {
  pagedList(byId("duplicate-cards"), byId("duplicate-more"), analyses[0].near_duplicates.pairs, ({ items: [a, b], similarity, exact }) =>
    [card([tile(a), tile(b)], line(nameText(className(a))), line(items.labels[a] === items.labels[b] ? "same class" : nameText(className(b))),
      line(exact ? "identical" : `cosine ${similarity.toFixed(3)}`))], 12);
}

// --- comparison of runs -----------------------------------------------------------------------------------------------

function showComparison() {
  const comparison = comparisons[state.comparison], second = state.comparison + 1, letter = names[second].split(":")[0];
  const options = [["fixed", "Fixed"], ["broken", "Broken"]].map(([change, text]) => [change, `${text} by ${letter} (${comparison[change].count.toLocaleString("en")})`]);
  choices(byId("change-choices"), options, state.change, (change) => { state.change = change; showComparison(); });
  pagedList(byId("changed-rows"), byId("changed-more"), comparison[state.change].items, (item) => [queryRow(item, 0, "A"), queryRow(item, second, letter)], 5);
  table(byId("gain-table"), [
    ["class", (row) => items.class_names[row.class], (row) => classCell(row.class)],
    ["queries", (row) => row.queries],
    ["A, R@1", (row) => row.before, (row) => percent(row.before)],
    [`${letter}, R@1`, (row) => row.after, (row) => percent(row.after)],
    ["gain", (row) => row.gain, (row) => `${row.gain > 0 ? "+" : ""}${percent(row.gain)}`],
  ], comparison.classes, { search: byId("gain-search"), more: byId("gain-more"), sort: 4, descending: true, limit: 12 });
}

function showRun(run) {
  if (state.point >= 0) showPoint(-1);
  state.run = run;
  if (names.length > 1) choices(byId("run-choices"), names.map((name, i) => [String(i), name]), String(run), (i) => showRun(Number(i)));
  document.querySelectorAll(".of-run").forEach((element) => { element.hidden = Number(element.dataset.run) !== run; });
  if (!items) return;
  showExamples();
  showMap(state.projection);
  showClasses();
  showConfusedPairs();
  showHubs();
  showLabelErrors();
}

if (items) {
  byId("class-names").append(...items.class_names.map((name) => make("option", { value: name })));
  byId("pair").onchange = (event) => { state.pair = Number(event.target.value); showExamples(); };
  byId("class-choice").oninput = (event) => { state.view = event.target.value ? "class" : "confident_errors"; showExamples(); };
  addArrowKeys(byId("query-rows"));
  startMap();
  showDuplicates();
  if (comparisons.length) {
    addArrowKeys(byId("changed-rows"));
    if (byId("compared-run")) byId("compared-run").onchange = (event) => { state.comparison = Number(event.target.value); showComparison(); };
    showComparison();
  }
}
showRun(0);
})();
