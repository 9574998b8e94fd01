// The charts of a run: one range of steps and one cursor for all of them.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("run-data").textContent);
const steps = data.steps;
const last = steps.length - 1;
const MARGIN = {left: 66, right: 14, top: 10, bottom: 26}; // left: at least; the longest number of all charts decides
const HEIGHT = {s: 240, lambda: 190, data_bpt: 280, learned: 300};
const MIN_GAP = 60; // pixels between two labelled ticks of an axis

// Numbers.

function plain(value, whole = false) { // to four figures; whole, as it is
  if (value === 0) return "0";
  const size = Math.abs(value), rounded = Number(value.toPrecision(whole ? 12 : 4));
  if (size >= 1e7 || size < 1e-4) return (whole ? rounded.toExponential() : value.toExponential(2)).replace("e+", "e");
  if (size >= 1000) return (whole ? rounded : Math.round(value)).toLocaleString("en", {maximumFractionDigits: 9});
  return String(rounded);
}

const FORMATS = {
  number: plain,
  percent: (value, whole) => `${plain(100 * value, whole)} %`,
};

const pen = document.createElement("canvas").getContext("2d");

function widthOf(text) { // of a number at an axis, pixels; also while the chart is folded away
  pen.font = `13px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

function near(sorted, value) { // index of the nearest entry
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

function linearTicks(low, high, most) {
  const rough = (high - low) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({length: count}, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  if (decades < 0.9) return linearTicks(low, high, most);
  const factors = decades < 1.8 ? [1, 2, 5] : decades < 3.5 ? [1, 3] : [1];
  const skip = Math.max(1, Math.ceil(decades / most));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (factors.length === 1 && power % skip) continue;
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(6));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function element(name, attributes = {}, parent = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

function html(name, className, text, parent) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  parent?.append(made);
  return made;
}

// What all charts share.

const view = {
  full: [0, Math.max(steps[last], ...data.validations.map(([step]) => step), 1)],
  shown: null,   // [from, to] in steps
  cursor: last,  // index of a tick
  drag: null,    // [from, to] in steps, while a range is being drawn
  charts: [],

  show(from, to) {
    const [first, end] = this.full;
    const width = Math.min(Math.max(to - from, Math.min(2, end)), end - first);
    const start = Math.min(Math.max(from, first), end - width);
    this.shown = [start, start + width];
    this.cursor = this.inSight(this.cursor);
    this.draw();
  },
  inSight(index) { // the nearest tick in sight; the same where none is
    const [from, to] = this.shown;
    let found = index;
    while (found < last && steps[found] < from) found++;
    while (found > 0 && steps[found] > to) found--;
    return steps[found] >= from && steps[found] <= to ? found : index;
  },
  zoom(factor) { // around the cursor
    const [from, to] = this.shown;
    const centre = Math.min(Math.max(steps[this.cursor], from), to);
    this.show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  },
  reset() { this.show(...this.full); },
  point(index) {
    this.cursor = Math.min(Math.max(index, 0), last);
    const [from, to] = this.shown, at = steps[this.cursor];
    if (at < from) this.show(at, at + to - from);
    else if (at > to) this.show(at - (to - from), at);
    else this.mark();
  },
  draw() {
    this.left = Math.max(MARGIN.left, ...this.charts.map(chart => chart.room() + 10)); // they line up
    this.charts.forEach(chart => chart.draw());
    this.mark();
  },
  mark() { this.charts.forEach(chart => chart.mark()); readout(); },
};

// What stands at a tick.

function valueAt(series, index) { // [value, step where it was measured]
  if (series.form !== "points") return [data.columns[series.column][index], steps[index]];
  const before = data.validations.filter(([step]) => step <= steps[index]);
  return before.length ? [before[before.length - 1][1], before[before.length - 1][0]] : [null, null];
}

function worded(chart, series) {
  const [value, step] = valueAt(series, view.cursor);
  if (value === null) return "–";
  const words = FORMATS[chart.numberFormat](value);
  return series.form === "points" && step !== steps[view.cursor] ? `${words} (step ${plain(step)})` : words;
}

function readout() {
  const index = view.cursor, [from, to] = view.shown;
  const tokens = data.tokens[index];
  const parts = [tokens === null ? "" : `${tokens.toLocaleString("en")} tokens`];
  if (data.marks.saturated.includes(index)) parts.push("λ at a bound");
  if (data.marks.held.includes(index)) parts.push("held: no usable measurement");
  const whole = from === view.full[0] && to === view.full[1];
  if (!whole) parts.push(`shown: steps ${plain(Math.ceil(from))} to ${plain(Math.floor(to))}`);
  const place = document.getElementById("readout");
  place.querySelector("strong").textContent = `step ${plain(steps[index])}`;
  place.querySelector("span").textContent = parts.filter(Boolean).join(" · ");
  document.getElementById("reset").disabled = document.getElementById("out").disabled = whole;
}

// A chart.

class Chart {
  constructor(definition, figure) {
    const {numbers, ...rest} = definition;
    Object.assign(this, rest, {numberFormat: numbers});
    this.plot = figure.querySelector(".plot");
    this.svg = element("svg", {"aria-hidden": "true"});
    this.plot.append(this.svg);
    this.height = HEIGHT[this.name] ?? 170;
    this.legend = this.makeLegend(figure.querySelector(".legend"));
    this.listen();
  }

  makeLegend(place) {
    const entries = this.series.filter(series => this.points(series).length).map(series => {
      const entry = html("span", series.colour, "", place);
      html("i", series.form, "", entry);
      entry.append(`${series.label} `);
      const value = html("b", "", "", entry);
      if (series.band) html("span", "faint", ` (±${100 * data.band} % shaded)`, entry);
      return [series, value];
    });
    if (this.series.some(series => series.marks)) {
      for (const [name, label] of [["saturated", "at a bound"], ["held", "held"]]) {
        if (!data.marks[name].length) continue;
        const entry = html("span", "orange", "", place);
        html("i", name, "", entry);
        entry.append(label);
      }
    }
    return entries;
  }

  points(series) { // [step, value or null, how far the shading reaches]
    if (series.form === "points") return data.validations;
    const reach = value => series.band ? value * data.band : 0;
    return data.columns[series.column].some(value => value !== null)
      ? data.columns[series.column].map((value, index) => [steps[index], value, reach(value)]) : [];
  }

  limits() { // of the values in sight, and whether the scale is logarithmic
    const [from, to] = view.shown, values = [];
    for (const series of this.series) {
      const points = this.points(series);
      points.forEach(([step, value, reach], index) => {
        // A line is also in sight between two points of which one is.
        const reaches = series.form !== "points"
          && ((points[index + 1]?.[0] ?? step) >= from && (points[index - 1]?.[0] ?? step) <= to);
        if (value === null || !(reaches || (step >= from && step <= to))) return;
        values.push(value);
        if (reach) values.push(value - reach, value + reach);
      });
    }
    const shown = values.filter(value => this.scale !== "log" || value > 0);
    if (!shown.length) return null;
    const positive = shown.filter(value => value > 0).sort((a, b) => a - b);
    const least = positive[0], most = positive[positive.length - 1];
    // One rise from 0 needs no logarithm; values that dwell in several decades do.
    const low20 = positive[Math.floor(0.2 * positive.length)];
    if (this.scale === "log" || (this.scale === "auto" && positive.length && most > 10 * low20)) {
      let low = Math.max(least, this.scale === "auto" ? most / 300 : 0) / 1.25, high = most * 1.25;
      if (high < 4 * low) { // nearly constant: keep noise from filling the chart
        const middle = Math.sqrt(low * high);
        [low, high] = [middle / 2, middle * 2];
      }
      return {low, high, log: true};
    }
    const low = Math.min(...shown), high = Math.max(...shown);
    const pad = 0.08 * (high - low) || 0.05 * Math.abs(high) || 1;
    return {low: this.scale === "zero" || (low >= 0 && low < pad) ? 0 : low - pad, high: high + pad, log: false};
  }

  numbers(limits) { // [value, words] at the axis
    if (!limits) return [];
    const most = (this.height - MARGIN.top - MARGIN.bottom) / 38;
    const values = (limits.log ? logTicks : linearTicks)(limits.low, limits.high, most);
    return values.map(value => [value, FORMATS[this.numberFormat](value, true)]); // they are round already
  }

  room() { return Math.max(0, ...this.numbers(this.limits()).map(([, words]) => widthOf(words))); }

  draw() {
    // A page that is not laid out has no width, and is drawn again when it has one.
    const width = Math.max(this.plot.clientWidth, view.left + MARGIN.right + 1), height = this.height;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.inner = {left: view.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom};
    const [from, to] = this.span();
    this.x = step => this.inner.left + (step - from) / (to - from) * (this.inner.right - this.inner.left);
    this.stepAt = pixel => from + (pixel - this.inner.left) / (this.inner.right - this.inner.left) * (to - from);
    const limits = this.limits();
    const scaled = limits && (limits.log ? Math.log : value => value);
    this.y = value => this.inner.bottom
      - (scaled(value) - scaled(limits.low)) / (scaled(limits.high) - scaled(limits.low))
      * (this.inner.bottom - this.inner.top);
    this.positiveOnly = Boolean(limits?.log);
    this.drawAxes(limits);
    this.lines = this.layer("lines", 0);
    this.dots = this.layer("dots", 6); // those at the ends are whole
    if (limits) this.series.forEach(series => this.drawSeries(series));
    this.over = this.layer("over", 6);
  }

  span() { return view.shown; } // from where to where it goes across

  across() { // [value, words] below it, and what they are
    const {left, right} = this.inner;
    const found = linearTicks(...this.span(), (right - left) / (1.6 * MIN_GAP)).filter(Number.isInteger);
    return [found.map(step => [step, plain(step)]), "steps"];
  }

  layer(name, beyond) { // a group that ends so many pixels beyond the axes
    const clip = element("clipPath", {id: `${name}-${this.name}`}, this.svg);
    element("rect", {
      x: this.inner.left - beyond, width: this.inner.right - this.inner.left + 2 * beyond,
      y: 0, height: this.inner.bottom + beyond,
    }, clip);
    return element("g", {"clip-path": `url(#${name}-${this.name})`}, this.svg);
  }

  drawAxes(limits) {
    const {left, right, top, bottom} = this.inner;
    const [below, what] = this.across();
    let free = left - 10; // where the word for them ends
    for (const [value, text] of below) {
      element("line", {x1: this.x(value), x2: this.x(value), y1: top, y2: bottom, class: "grid"}, this.svg);
      const half = widthOf(text) / 2, at = Math.min(this.x(value), right + MARGIN.right - half);
      if (at - half < free) continue;
      this.label(at, bottom + 18, text, "middle", "step");
      free = at + half + 6;
    }
    element("line", {x1: left, x2: right, y1: bottom, y2: bottom, class: "axis"}, this.svg);
    this.label(left - 14, bottom + 18, what, "end");
    if (!limits) return this.label((left + right) / 2, (top + bottom) / 2, "nothing measured in these steps", "middle");
    for (const [value, words] of this.numbers(limits)) {
      element("line", {x1: left, x2: right, y1: this.y(value), y2: this.y(value), class: "grid"}, this.svg);
      this.label(left - 8, this.y(value) + 4.5, words, "end");
    }
  }

  label(x, y, text, anchor, name = "") {
    element("text", {x, y, "text-anchor": anchor, class: name}, this.svg).textContent = text;
  }

  drawSeries(series) {
    const drawable = value => value !== null && !(this.positiveOnly && value <= 0);
    const points = this.points(series);
    if (series.form === "points") {
      for (const [step, value] of points) if (drawable(value)) this.dot(this.dots, series.colour, step, value, 4.5);
      return;
    }
    const runs = []; // stretches without a gap
    points.forEach((point, index) => {
      if (!drawable(point[1])) return;
      const before = index > 0 && drawable(points[index - 1][1]);
      if (before) runs[runs.length - 1].push(point); else runs.push([point]);
    });
    // A record's setpoint held since the record before it, the first one's since the start of the run.
    if (series.form === "since" && runs.length && runs[0][0][0] === points[0][0]) runs[0].unshift([0, ...runs[0][0].slice(1)]);
    for (const run of runs) {
      if (series.band) this.drawBand(series, run);
      if (run.length === 1) this.dot(this.dots, series.colour, ...run[0].slice(0, 2), 3);
      else element("path", {d: this.trace(run, series.form), class: `line ${series.form} ${series.colour}`}, this.lines);
    }
    if (series.marks) for (const name of ["saturated", "held"]) {
      for (const index of data.marks[name]) {
        const value = data.columns[series.column][index];
        if (drawable(value)) this.dot(this.dots, `orange ${name}`, steps[index], value, 3.5);
      }
    }
  }

  trace(run, form) {
    const at = ([step, value]) => [this.x(step).toFixed(1), this.y(value).toFixed(1)];
    const [first, ...rest] = run.map(at);
    let path = `M${first[0]},${first[1]}`;
    for (const [x, y] of rest) path += form === "until" ? `H${x}V${y}` : form === "since" ? `V${y}H${x}` : `L${x},${y}`;
    return path;
  }

  drawBand(series, run) {
    const edge = sign => run.map(([step, value, reach]) => [step, value + sign * reach]);
    const upper = this.trace(edge(1), series.form);
    const [first, ...rest] = edge(-1).reverse();
    const at = ([step, value]) => [this.x(step).toFixed(1), this.y(value).toFixed(1)];
    let path = `${upper}L${at(first)}`;
    for (const [x, y] of rest.map(at)) path += series.form === "since" ? `H${x}V${y}` : `L${x},${y}`;
    element("path", {d: `${path}Z`, class: `band ${series.colour}`}, this.lines);
  }

  dot(parent, classes, step, value, radius) {
    element("circle", {cx: this.x(step), cy: this.y(value), r: radius, class: `dot ${classes}`}, parent);
  }

  mark() { // the cursor, the range being drawn, and the numbers at the cursor
    this.over.replaceChildren();
    const {left, right, top, bottom} = this.inner;
    if (view.drag) {
      const [from, to] = view.drag.map(this.x).sort((a, b) => a - b);
      element("rect", {
        x: Math.max(from, left), y: top, width: Math.max(0, Math.min(to, right) - Math.max(from, left)),
        height: bottom - top, class: "selection",
      }, this.over);
    }
    const x = this.x(steps[view.cursor]);
    element("line", {x1: x, x2: x, y1: top, y2: bottom, class: "cursor"}, this.over);
    for (const [series, place] of this.legend) {
      place.textContent = worded(this, series);
      const [value, step] = valueAt(series, view.cursor);
      if (value !== null && !(this.positiveOnly && value <= 0)) this.dot(this.over, series.colour, step, value, 5);
    }
    const said = this.legend.map(([series]) => `${series.label} ${worded(this, series)}`).join(", ");
    this.plot.setAttribute("aria-valuenow", steps[view.cursor]);
    this.plot.setAttribute("aria-valuetext", `step ${steps[view.cursor]}: ${said}`);
  }

  listen() {
    const plot = this.plot;
    const stepOf = event => this.stepAt(event.clientX - plot.getBoundingClientRect().left);
    plot.addEventListener("pointerdown", event => {
      if (event.button !== 0) return;
      view.point(view.inSight(near(steps, stepOf(event))));
      if (event.pointerType === "touch") return; // a finger moves the cursor; the buttons zoom
      plot.setPointerCapture(event.pointerId);
      view.drag = [stepOf(event), stepOf(event)];
    });
    plot.addEventListener("pointermove", event => {
      if (view.drag) view.drag[1] = stepOf(event);
      view.point(view.inSight(near(steps, stepOf(event))));
    });
    plot.addEventListener("pointerup", () => {
      const drag = view.drag;
      view.drag = null;
      if (!drag) return;
      const [from, to] = drag.sort((a, b) => a - b);
      if (this.x(to) - this.x(from) > 8) view.show(from, to); else view.mark();
    });
    plot.addEventListener("pointercancel", () => { view.drag = null; view.mark(); });
    plot.addEventListener("dblclick", () => view.reset());
    this.listenToKeys();
  }

  listenToKeys() {
    this.plot.addEventListener("keydown", event => {
      const action = KEYS[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    });
  }
}

// The run as a path: what it had learned against how far the model had drifted, up to its budget.

class Path extends Chart {
  makeLegend(place) {
    const entry = (classes, form, words) => {
      const made = html("span", classes, "", place);
      html("i", form, "", made);
      made.append(words);
      return made;
    };
    const [series] = this.series;
    const value = html("b", "", "", entry(series.colour, "line", `${series.label}, from the open dot on: `));
    if (this.budget !== null) entry("green", "since", `at most ${FORMATS.percent(this.budget)}`);
    if (this.keptPoint) entry("vermilion", "held", `the adapter that is kept: step ${plain(this.kept)}`);
    return value;
  }

  limits() {
    const values = this.path.map(([, , bits]) => bits).concat(this.keptPoint?.[1] ?? []);
    const low = Math.min(...values), high = Math.max(...values), pad = 0.08 * (high - low) || 0.05 * Math.abs(high) || 1;
    return {low: low - pad, high: high + pad, log: false};
  }

  span() { return [0, 1.08 * Math.max(this.budget ?? 0, this.keptPoint?.[0] ?? 0, ...this.path.map(([, drift]) => drift)) || 1]; }

  across() {
    const {left, right} = this.inner;
    const found = linearTicks(...this.span(), (right - left) / (1.8 * MIN_GAP));
    return [found.map(value => [value, FORMATS.percent(value, true)]), "drift"];
  }

  drawSeries(series) {
    const {top, bottom} = this.inner;
    if (this.budget !== null) {
      const x = this.x(this.budget);
      element("line", {x1: x, x2: x, y1: top, y2: bottom, class: "line since green"}, this.lines);
    }
    const run = this.path.map(([, drift, bits]) => [drift, bits]);
    element("path", {d: this.trace(run, "line"), class: `line ${series.colour}`}, this.lines);
    if (run.length <= 60) for (const point of run) this.dot(this.dots, series.colour, ...point, 3);
    this.dot(this.dots, `${series.colour} held`, ...run[0], 4.5);
    if (this.keptPoint) this.dot(this.dots, "vermilion held", ...this.keptPoint, 7);
  }

  mark() { // where the run was at the cursor
    this.over.replaceChildren();
    const point = this.path.filter(([step]) => step <= steps[view.cursor]).pop();
    const words = point ? `${plain(point[2])} at ${FORMATS.percent(point[1])}, step ${plain(point[0])}` : "–";
    this.legend.textContent = words;
    if (point) this.dot(this.over, this.series[0].colour, point[1], point[2], 5);
    this.plot.setAttribute("aria-valuenow", steps[view.cursor]);
    this.plot.setAttribute("aria-valuetext", `${this.series[0].label} ${words}`);
  }

  listen() {
    const point = event => {
      const box = this.plot.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const away = ([, drift, bits]) => Math.hypot(this.x(drift) - x, this.y(bits) - y);
      const nearest = this.path.reduce((best, each) => away(each) < away(best) ? each : best);
      view.point(near(steps, nearest[0]));
    };
    this.plot.addEventListener("pointermove", point);
    this.plot.addEventListener("pointerdown", point);
    this.listenToKeys();
  }
}

const KEYS = {
  ArrowRight: () => view.point(view.cursor + 1),
  ArrowUp: () => view.point(view.cursor + 1),
  ArrowLeft: () => view.point(view.cursor - 1),
  ArrowDown: () => view.point(view.cursor - 1),
  PageUp: () => view.point(view.cursor + 10),
  PageDown: () => view.point(view.cursor - 10),
  Home: () => view.point(0),
  End: () => view.point(last),
  "+": () => view.zoom(0.5),
  "=": () => view.zoom(0.5),
  "-": () => view.zoom(2),
  "0": () => view.reset(),
  Escape: () => view.reset(),
};

// Start.

view.shown = [...view.full];
for (const definition of data.charts) {
  const figure = document.getElementById(`chart-${definition.name}`);
  if (figure.querySelector(".plot")) view.charts.push(new (definition.path ? Path : Chart)(definition, figure));
}
document.getElementById("in").addEventListener("click", () => view.zoom(0.5));
document.getElementById("out").addEventListener("click", () => view.zoom(2));
document.getElementById("reset").addEventListener("click", () => view.reset());
document.getElementById("controls").hidden = !view.charts.length;
new ResizeObserver(() => view.draw()).observe(document.querySelector("main"));
view.draw();
})();
