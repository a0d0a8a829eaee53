// A list of any length: only the rows in sight are in the page.
"use strict";

const MOST_ROWS = 100000; // browsers bound the height of a page

// draw(n) returns the elements of row n.
function showRows(count, height, draw) {
  const main = document.querySelector("main");
  const shown = Math.min(count, MOST_ROWS);
  const space = element("div");
  space.style.height = `${shown * height}px`;
  main.replaceChildren(count ? space : element("p", "Nothing was found.", "nothing"));
  main.scrollTop = 0;
  const rows = new Map();
  main.onscroll = () => {
    const first = Math.max(0, Math.floor(main.scrollTop / height) - 2);
    const last = Math.min(shown, Math.ceil((main.scrollTop + main.clientHeight) / height) + 2);
    for (const [n, row] of rows) {
      if (n < first || n >= last) { row.remove(); rows.delete(n); }
    }
    for (let n = first; n < last; n++) {
      if (rows.has(n)) continue;
      const row = element("div", "", "row");
      row.style.top = `${n * height + 6}px`;
      row.append(...draw(n));
      rows.set(n, row);
      space.append(row);
    }
  };
  main.onscroll();
}
