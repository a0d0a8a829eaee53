"""The script of a report's page: values under the mouse, zoom, and figures as SVG or CSV.

Figures are drawn by Python and are whole without it. A zoom moves what is drawn: pixels of an axis map
to pixels linearly, also where its values are logarithmic, so only the ticks are made anew.
"""

SCRIPT = """
'use strict';
const save = (name, kind, text) => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
};
const axisOf = text => {
  const [low, high, start, end, log] = text.split(' ').map(Number);
  const to = log ? Math.log2 : v => v, from = log ? v => 2 ** v : v => v;
  const value = p => from(to(low) + (p - start) / (end - start) * (to(high) - to(low)));
  const pixel = v => start + (to(v) - to(low)) / (to(high) - to(low)) * (end - start);
  return { start, end, log, value, pixel };
};
const ticksOf = (axis, [a, b]) => {
  const low = axis.value(a), high = axis.value(b);
  const decades = [...Array(40).keys()].flatMap(n => [1, 2, 5].map(f => f * 10 ** (n - 20)));
  let found = axis.log ? decades.filter(v => low <= v && v <= high) : [];
  if (found.length < 3) {
    let step = 10 ** Math.floor(Math.log10((high - low) / 4));
    step *= [1, 2, 5, 10].find(f => (high - low) / (step * f) <= 5);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    found = Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  }
  return found;
};
const short = v => Number(v.toPrecision(6)).toLocaleString('en');

for (const figure of document.querySelectorAll('figure')) {
  const svg = figure.querySelector('svg'), title = figure.querySelector('figcaption').textContent;
  const name = title.replace(/[^A-Za-z0-9@]+/g, '_').slice(0, 80);
  const tip = figure.appendChild(document.createElement('output'));
  const buttons = figure.querySelector('figcaption').appendChild(document.createElement('span'));
  const button = (text, action) => {
    const made = buttons.appendChild(document.createElement('button'));
    made.textContent = text;
    made.onclick = action;
    return made;
  };
  button('SVG', () => {
    const copy = svg.cloneNode(true), [, , width, height] = svg.getAttribute('viewBox').split(' ');
    const spans = [...figure.querySelectorAll('.legend span')];
    copy.setAttribute('viewBox', `0 0 ${width} ${Number(height) + 16 * spans.length + 4}`);
    const style = document.createElementNS(svg.namespaceURI, 'style');
    style.textContent = document.querySelector('style').textContent;
    copy.prepend(style);
    spans.forEach((span, i) => {
      const y = Number(height) + 16 * i + 10, line = copy.appendChild(span.querySelector('i')
        ? document.createElementNS(svg.namespaceURI, 'path')
        : document.createElementNS(svg.namespaceURI, 'g'));
      line.setAttribute('d', `M52 ${y - 4}h18`);
      line.setAttribute('class', `series ${span.className}`);
      line.setAttribute('style', span.getAttribute('style') || '');
      const text = copy.appendChild(document.createElementNS(svg.namespaceURI, 'text'));
      text.setAttribute('x', 76);
      text.setAttribute('y', y);
      text.textContent = span.textContent;
    });
    save(`${name}.svg`, 'image/svg+xml', new XMLSerializer().serializeToString(copy));
  });
  button('CSV', () => {
    const rows = [...svg.querySelectorAll('[data-row]')].map(each => each.dataset.row);
    save(`${name}.csv`, 'text/csv', [svg.dataset.columns, ...rows, ''].join('\\n'));
  });
  const there = event => {
    const point = new DOMPoint(event.clientX, event.clientY);
    return point.matrixTransform(svg.getScreenCTM().inverse());
  };
  const points = [...svg.querySelectorAll('[data-row]')];
  const middle = each => {
    const box = each.getBBox();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const show = event => {
    const at = there(event);
    const far = each => Math.hypot(middle(each)[0] - at.x, middle(each)[1] - at.y);
    const near = points.reduce((a, b) => far(b) < far(a) ? b : a, points[0]);
    points.forEach(each => each.classList.toggle('near', each === near && far(each) < 40));
    tip.textContent = near && far(near) < 40 ? near.querySelector('title').textContent : '';
  };
  svg.onpointerleave = () => {
    points.forEach(each => each.classList.remove('near'));
    tip.textContent = '';
  };
  if (!svg.dataset.x) {
    svg.onpointermove = show;
    continue;
  }

  const X = axisOf(svg.dataset.x), Y = axisOf(svg.dataset.y), ticks = svg.querySelector('.ticks');
  const whole = [[X.start, X.end], [Y.start, Y.end]], drawn = ticks.innerHTML;
  let view = whole, from = null;
  const moved = (p, axis, [a, b]) => axis.start + (p - a) / (b - a) * (axis.end - axis.start);
  const parts = [...svg.querySelectorAll('svg circle, svg line, svg polyline')].map(each => {
    const numbers = key => (each.getAttribute(key) || '').split(/[ ,]+/).map(Number);
    const keys = { circle: ['cx', 'cy'], line: ['x1', 'y1', 'x2', 'y2'], polyline: ['points'] };
    return [each, keys[each.tagName].map(key => [key, numbers(key)])];
  });
  const place = () => {
    for (const [each, attributes] of parts)
      attributes.forEach(([key, numbers], i) => each.setAttribute(key, numbers.map((p, j) =>
        (key === 'points' ? j : i) % 2 ? moved(p, Y, view[1]) : moved(p, X, view[0])).join(' ')));
    ticks.innerHTML = view === whole ? drawn : ticksOf(Y, view[1]).map(v => {
      const y = moved(Y.pixel(v), Y, view[1]);
      return `<line class="grid" x1="${X.start}" x2="${X.end}" y1="${y}" y2="${y}"/>`
        + `<text class="end" x="${X.start - 6}" y="${y + 4}">${short(100 * v)}%</text>`;
    }).join('') + (view === whole ? '' : ticksOf(X, view[0]).map(v =>
      `<text class="mid" x="${moved(X.pixel(v), X, view[0])}" y="${Y.start + 16}">${short(v)}</text>`
    ).join(''));
    back.hidden = view === whole;
  };
  const back = button('reset zoom', () => { view = whole; place(); });
  back.hidden = true;
  const frame = svg.appendChild(document.createElementNS(svg.namespaceURI, 'rect'));
  frame.setAttribute('class', 'frame');
  const box = at => [[from.x, at.x], [from.y, at.y]].map(pair => pair.sort((a, b) => a - b));
  svg.onpointerdown = event => { from = there(event); svg.setPointerCapture(event.pointerId); };
  svg.onpointermove = event => {
    if (!from) return show(event);
    const [[x0, x1], [y0, y1]] = box(there(event));
    Object.entries({ x: x0, y: y0, width: x1 - x0, height: y1 - y0 })
      .forEach(([key, value]) => frame.setAttribute(key, value));
  };
  svg.onpointerup = event => {
    const [[x0, x1], [y0, y1]] = box(there(event));
    from = null;
    frame.setAttribute('width', 0);
    if (x1 - x0 < 5 || y1 - y0 < 5) return;
    const before = (p, axis, [a, b]) => a + (p - axis.start) / (axis.end - axis.start) * (b - a);
    view = [[before(x0, X, view[0]), before(x1, X, view[0])],
            [before(y1, Y, view[1]), before(y0, Y, view[1])]];
    place();
  };
  svg.ondblclick = () => { view = whole; place(); };
}
"""
