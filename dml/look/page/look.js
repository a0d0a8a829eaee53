// The page: scores, tabs, the filter by class, and what each tab lists.
"use strict";

const [FIRST, SECOND] = DATA.runs;
const BOTH = SECOND !== undefined;
const find = (id) => document.getElementById(id);
const numbered = (count) => Array.from({ length: count }, (_, i) => i);

// How queries are ordered: each returns a number per query, the largest first.
const ORDERS = BOTH
  ? {
      [`worst of ${FIRST.name}`]: (i) => FIRST.ahead[i],
      [`worst of ${SECOND.name}`]: (i) => SECOND.ahead[i],
      [`${SECOND.name} is better`]: (i) => FIRST.ahead[i] - SECOND.ahead[i],
      [`${FIRST.name} is better`]: (i) => SECOND.ahead[i] - FIRST.ahead[i],
    }
  : {
      "worst first": (i) => FIRST.ahead[i],
      "best first": (i) => -FIRST.ahead[i],
    };

// A query without another image of its class can find nothing right: it is last in every order.
function ordered(items, value) {
  const values = new Map(items.map((i) => [i, FIRST.own[i] < 0 ? -Infinity : value(i)]));
  return items.sort((a, b) => (values.get(a) === values.get(b) ? a - b : values.get(b) - values.get(a)));
}

// Entries of a list of every run, each with its run.
const ofRuns = (list) => DATA.runs.flatMap((run) => run[list].map((entry) => [run, entry]));
const runNote = (run) => (BOTH ? [element("i", run.name)] : []);

function note(title, ...lines) {
  const made = element("div", "", "note");
  made.append(element("b", title), ...lines.map((line) => (line instanceof Node ? line : element("div", line))));
  return made;
}

// A tab: what it is about, its entries, the images or classes by which an entry is filtered, and a row.
const TABS = {
  queries: {
    title: "Queries",
    about: "Each query, and its nearest neighbours: green of its class, red of another. Click on an image to see all of them.",
    height: 118,
    entries: () => ordered(numbered(DATA.queries), ORDERS[find("order").value]),
    classes: (i) => [DATA.labels[i]],
    row: (i) => {
      const lines = DATA.runs.map((run) => (BOTH ? `${run.name}: ${rankNote(run, i)}` : rankNote(run, i)));
      const found = DATA.runs.map((run) => neighboursOf(run, i, BOTH ? 5 : DATA.neighbours));
      return [note(className(i), ...lines), figure(i, "plain", className(i), "query"), ...found];
    },
  },
  confused: {
    title: "Confused classes",
    about: "Pairs of classes: queries of one whose nearest neighbour is of the other.",
    height: 118,
    entries: () => ofRuns("confused"),
    classes: ([, [a, b]]) => [a, b],
    row: ([run, [a, b, count, examples]]) => {
      const pairs = examples.map(([query, found]) => {
        const pair = element("div", "", "run");
        pair.append(figure(query, "plain", className(query), "query"), figure(found, "wrong", className(found), similarity(run.similarities[query * DATA.neighbours])));
        return pair;
      });
      const text = count === 1 ? "1 query" : `${count} queries`;
      return [note(`${DATA.classes[a]} / ${DATA.classes[b]}`, text, ...runNote(run)), ...pairs];
    },
  },
  copies: {
    title: "Near-duplicates",
    about: "Images that are almost the same to the pixel, although their classes or splits differ.",
    height: 118,
    entries: () => ofRuns("copies"),
    classes: ([, [a, b]]) => [DATA.labels[a], DATA.labels[b]],
    row: ([run, [a, b, correlation]]) => [
      note(`${className(a)} / ${className(b)}`, `correlation ${correlation.toFixed(3)}`, ...runNote(run)),
      figure(a, "plain", className(a), splitOf(a)),
      figure(b, "plain", className(b), splitOf(b)),
    ],
  },
  suspects: {
    title: "Suspicious labels",
    about: "Images whose neighbours agree on another class, the most suspicious first: wrong labels, or errors of the model.",
    height: 118,
    entries: () => ofRuns("suspects"),
    classes: ([, [query, other]]) => [DATA.labels[query], other],
    row: ([run, [query, other, suspicion]]) => [
      note(`${className(query)} → ${DATA.classes[other]}?`, `by ${suspicion.toFixed(3)}`, ...runNote(run)),
      figure(query, "plain", className(query), "labelled"),
      ...(run.own[query] < 0 ? [] : [figure(run.own[query], "right", className(query), similarity(run.ownSimilarity[query]))]),
      neighboursOf(run, query, DATA.neighbours),
    ],
  },
  map: {
    title: "Map",
    about: "A point per image, a colour per class, neighbours close together. The wheel zooms, dragging moves, a click shows the image.",
  },
};

let tab = "queries";

// Whether each class has the text of the filter in its name.
function chosenClasses() {
  const text = find("class").value.trim().toLowerCase();
  return DATA.classes.map((name) => name.toLowerCase().includes(text));
}

function show() {
  const { about, height, entries, classes, row } = TABS[tab];
  const chosen = chosenClasses();
  for (const button of find("tabs").children) button.ariaSelected = button.dataset.tab === tab;
  find("about").textContent = about;
  find("orders").hidden = tab !== "queries";
  if (tab === "map") {
    let count = 0;
    for (let i = 0; i < DATA.images; i++) count += chosen[DATA.labels[i]];
    find("count").textContent = `${count.toLocaleString("en")} images`;
    showMaps(chosen);
    return;
  }
  const list = entries().filter((entry) => classes(entry).some((c) => chosen[c]));
  find("count").textContent = `${list.length.toLocaleString("en")} found`;
  showRows(list.length, height, (n) => row(list[n]));
}

function filterBy(name) {
  find("class").value = name;
  show();
}

function start() {
  document.querySelector("h1").textContent = DATA.runs.map((run) => run.name).join(" beside ");
  document.title = `${DATA.runs.map((run) => run.name).join(", ")} – dml look`;
  const names = Object.keys(FIRST.scores);
  const head = element("tr");
  head.append(element("th", `${DATA.images.toLocaleString("en")} images, ${DATA.split}`), ...names.map((name) => element("th", name)));
  const lines = DATA.runs.map((run) => {
    const line = element("tr");
    line.append(element("td", run.name), ...names.map((name) => element("td", `${(100 * run.scores[name]).toFixed(1)}%`)));
    return line;
  });
  find("scores").append(head, ...lines);
  for (const [name, { title }] of Object.entries(TABS)) {
    const button = element("button", title);
    button.dataset.tab = name;
    button.role = "tab";
    button.addEventListener("click", () => { tab = name; show(); });
    find("tabs").append(button);
  }
  find("order").append(...Object.keys(ORDERS).map((name) => element("option", name)));
  find("order").addEventListener("change", show);
  find("class").addEventListener("input", show);
  addEventListener("resize", () => document.querySelector("main").onscroll?.());
  show();
}

start();
