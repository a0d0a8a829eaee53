// The map: a point per image, its thumbnail under the mouse; the wheel zooms, dragging moves.
"use strict";

const CELLS = 128; // per side of the grid in which the point under the mouse is looked for

class EmbeddingMap {
  constructor(run, canvas, chosen, hover) {
    Object.assign(this, { run, canvas, chosen, hover, scale: 1, x: 0, y: 0, marked: -1, dragged: false });
    this.points = element("canvas");
    this.grid = Array.from({ length: CELLS * CELLS }, () => []);
    for (let i = 0; i < DATA.images; i++) this.grid[this.cell(run.map[2 * i], run.map[2 * i + 1])].push(i);
    canvas.addEventListener("wheel", (event) => this.zoom(event), { passive: false });
    canvas.addEventListener("mousemove", (event) => this.move(event));
    canvas.addEventListener("mouseleave", () => this.hover(-1));
    canvas.addEventListener("mousedown", () => { this.dragged = false; });
    canvas.addEventListener("click", () => { if (this.marked >= 0 && !this.dragged) showImage(this.marked); });
    this.resize();
  }

  cell(u, v) {
    return Math.min(CELLS - 1, (v * CELLS) >> 16) * CELLS + Math.min(CELLS - 1, (u * CELLS) >> 16);
  }

  resize() {
    this.canvas.width = this.canvas.clientWidth;
    this.canvas.height = this.canvas.clientHeight;
    this.wide = this.canvas.width - 20;
    this.high = this.canvas.height - 20;
    this.draw();
  }

  place(i) {
    const { run, scale, wide, high, x, y } = this;
    return [10 + (run.map[2 * i] / 65535) * wide * scale + x, 10 + (run.map[2 * i + 1] / 65535) * high * scale + y];
  }

  // The points are kept, so that a mark that follows the mouse need not draw 60,000 of them again.
  draw() {
    const { width, height } = this.canvas;
    Object.assign(this.points, { width, height }); // also clears it
    const pen = this.points.getContext("2d");
    const side = Math.min(8, (DATA.images < 5000 ? 4 : 2) + this.scale / 2);
    for (const chosen of [false, true]) {
      for (let i = 0; i < DATA.images; i++) {
        if (this.chosen[DATA.labels[i]] !== chosen) continue;
        const [x, y] = this.place(i);
        if (x < -side || y < -side || x > width + side || y > height + side) continue;
        // neighbouring class numbers get distant hues
        pen.fillStyle = chosen ? `hsl(${(DATA.labels[i] * 137.508) % 360} 65% 45%)` : "#e4e4e4";
        pen.fillRect(x - side / 2, y - side / 2, side, side);
      }
    }
    this.mark(this.marked);
  }

  mark(i) {
    this.marked = i;
    const pen = this.canvas.getContext("2d");
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.points, 0, 0);
    if (i < 0) return;
    const [x, y] = this.place(i);
    pen.strokeRect(x - 6, y - 6, 12, 12);
  }

  zoom(event) {
    event.preventDefault();
    const factor = Math.min(200, Math.max(1, this.scale * 1.2 ** -Math.sign(event.deltaY))) / this.scale;
    this.x = event.offsetX - 10 - (event.offsetX - 10 - this.x) * factor;
    this.y = event.offsetY - 10 - (event.offsetY - 10 - this.y) * factor;
    this.scale *= factor;
    this.draw();
  }

  move(event) {
    if (event.buttons) {
      this.dragged = true;
      this.x += event.movementX;
      this.y += event.movementY;
      this.draw();
      return;
    }
    this.hover(this.nearest(event.offsetX, event.offsetY), event.clientX, event.clientY);
  }

  nearest(x, y) {
    const { wide, high, scale } = this;
    const [u, v] = [(x - 10 - this.x) / wide / scale, (y - 10 - this.y) / high / scale];
    const reach = Math.ceil((10 / Math.min(wide, high) / scale) * CELLS);
    const [column, row] = [Math.floor(u * CELLS), Math.floor(v * CELLS)];
    let best = -1, least = 100; // pixels, squared
    for (let r = Math.max(0, row - reach); r <= Math.min(CELLS - 1, row + reach); r++) {
      for (let c = Math.max(0, column - reach); c <= Math.min(CELLS - 1, column + reach); c++) {
        for (const i of this.grid[r * CELLS + c]) {
          if (!this.chosen[DATA.labels[i]]) continue;
          const [px, py] = this.place(i);
          const distance = (px - x) ** 2 + (py - y) ** 2;
          if (distance < least) [best, least] = [i, distance];
        }
      }
    }
    return best;
  }
}

// One map per run; the image under the mouse is marked in all of them. chosen: whether each class is.
function showMaps(chosen) {
  const main = document.querySelector("main");
  main.onscroll = null;
  const box = element("div", "", "maps");
  const card = element("div", "", "hover");
  card.hidden = true;
  main.replaceChildren(box, card);
  const hover = (i, x, y) => {
    for (const map of maps) map.mark(i);
    card.hidden = i < 0;
    if (i < 0) return;
    card.replaceChildren(figure(i, "plain", className(i)));
    card.style.left = `${Math.min(x + 14, innerWidth - 100)}px`;
    card.style.top = `${Math.min(y + 14, innerHeight - 130)}px`;
  };
  const maps = DATA.runs.map((run) => {
    const part = element("div");
    const canvas = element("canvas");
    if (DATA.runs.length > 1) part.append(element("b", run.name));
    part.append(canvas);
    box.append(part);
    return [run, canvas];
  }).map(([run, canvas]) => new EmbeddingMap(run, canvas, chosen, hover));
  onresize = () => maps.forEach((map) => map.canvas.isConnected && map.resize());
}
