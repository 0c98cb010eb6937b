// A small line chart as SVG, readable without seeing it by its caption.

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, POINTS] = [480, 240, 60, 24, 10, 400];

// points, dots: [[x, y], ...] in the order of x.
export function chart(title, points, dots = []) {
  const figure = document.createElement("figure");
  const drawn = thinned(points);
  const all = [...drawn, ...dots];
  const last = points.at(-1);
  figure.appendChild(document.createElement("figcaption")).textContent =
    last ? `${title}: ${short(last[1])} at update ${last[0]}` : `${title}: nothing yet`;
  if (!all.length) return figure;
  const [left, right] = range(all.map(([x]) => x));
  const [low, high] = range(all.map(([, y]) => y));
  const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - 10);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(element("line", { x1: LEFT, x2: WIDTH - 10, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const [value, anchor] of [[left, "start"], [right, "end"]]) {
    svg.append(element("text", { x: x(value), y: HEIGHT - 6, "text-anchor": anchor }, short(value)));
  }
  const path = drawn.map(([a, b], number) => `${number ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  svg.append(element("path", { d: path }));
  svg.append(...dots.map(([a, b]) => element("circle", { cx: x(a), cy: y(b), r: 3 })));
  figure.append(svg);
  return figure;
}

// The mean of every few neighbours, so that a long run draws as fast as a short one.
function thinned(points) {
  const size = Math.ceil(points.length / POINTS);
  const groups = Array.from({ length: Math.ceil(points.length / (size || 1)) }, (_, i) =>
    points.slice(i * size, (i + 1) * size));
  return groups.map((group) => [group.at(-1)[0], group.reduce((sum, [, y]) => sum + y, 0) / group.length]);
}

function range(values) {
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function short(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function element(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}
