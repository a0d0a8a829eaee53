// The arrays of data.js, and how one image is shown. An image is a number, in the order of DATA.names.
"use strict";

function unpack(text, Kind) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Kind(bytes.buffer);
}

DATA.labels = unpack(DATA.labels, Int32Array);
for (const run of DATA.runs) {
  run.places = unpack(run.places, Int32Array);
  run.similarities = unpack(run.similarities, Int16Array);
  run.ahead = unpack(run.ahead, Int32Array);
  run.own = unpack(run.own, Int32Array);
  run.ownSimilarity = unpack(run.ownSimilarity, Int16Array);
  run.map = unpack(run.map, Uint16Array);
}

const className = (i) => DATA.classes[DATA.labels[i]];
const splitOf = (i) => (i < DATA.images ? DATA.split : DATA.otherSplits[i - DATA.images]);
const similarity = (value) => (value / DATA.scale).toFixed(3);

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = kind;
  return made;
}

// A part of a sheet as the background; the browser loads a sheet when one of its images is shown.
function thumbnail(i) {
  const per = DATA.across * DATA.across;
  const [row, column] = [Math.floor((i % per) / DATA.across), i % DATA.across];
  const made = element("div", "", "thumb");
  made.style.backgroundImage = `url(sheets/${Math.floor(i / per)}.webp)`;
  made.style.backgroundPosition = `${-column * DATA.thumb}px ${-row * DATA.thumb}px`;
  return made;
}

// kind: right, wrong or plain, the colour of the frame. lines: below the image.
function figure(i, kind, ...lines) {
  const made = element("figure", "", kind);
  made.title = `${className(i)}\n${DATA.names[i]} (${splitOf(i)})`;
  const caption = element("figcaption");
  caption.append(...lines.map((line) => element("span", line)));
  made.append(thumbnail(i), caption);
  made.addEventListener("click", () => showImage(i));
  return made;
}

function neighboursOf(run, query, count) {
  const made = element("div", "", "run");
  for (let k = 0; k < Math.min(count, DATA.neighbours); k++) {
    const at = query * DATA.neighbours + k;
    const i = run.places[at];
    const kind = DATA.labels[i] === DATA.labels[query] ? "right" : "wrong";
    made.append(figure(i, kind, className(i), similarity(run.similarities[at])));
  }
  return made;
}

function rankNote(run, query) {
  if (run.own[query] < 0) return "no other image of its class";
  return `first right at rank ${(run.ahead[query] + 1).toLocaleString("en")} (${similarity(run.ownSimilarity[query])})`;
}

// Everything about one image, in the dialog.
function showImage(i) {
  const dialog = document.querySelector("dialog");
  const content = dialog.querySelector("div");
  content.replaceChildren(element("b", className(i)), element("div", `${DATA.names[i]} (${splitOf(i)})`));
  for (const run of i < DATA.queries ? DATA.runs : []) {
    const row = element("div", "", "row");
    row.append(figure(i, "plain", "query"), neighboursOf(run, i, DATA.neighbours));
    if (run.own[i] >= 0) {
      row.append(figure(run.own[i], "right", "nearest of its class", similarity(run.ownSimilarity[i])));
    }
    content.append(element("div", `${run.name}: ${rankNote(run, i)}`), row);
  }
  const same = element("button", `only ${className(i)}`);
  same.addEventListener("click", () => { dialog.close(); filterBy(className(i)); });
  content.append(same);
  if (!dialog.open) dialog.showModal();
}
