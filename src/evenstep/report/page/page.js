"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
const narrow = () => window.innerWidth < 600;
const config = { responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

// Colours follow the page's, which follow the reader's.
function themed({ layout, traces }) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), grid = style.getPropertyValue("--grid").trim();
  const ground = style.getPropertyValue("--ground").trim();
  const axis = { gridcolor: grid, linecolor: grid, tickcolor: grid };
  // The legend stands above the plot, and takes nothing of its height.
  const lines = Math.ceil(traces.filter((trace) => trace.showlegend !== false).length / (narrow() ? 3 : 9));
  return { ...layout,
    height: layout.height + 20 * (lines - 1),
    font: { ...layout.font, color: ink, size: narrow() ? 11 : 13 },
    margin: narrow() ? { ...layout.margin, l: 40, r: 4 } : layout.margin,
    hoverlabel: { bgcolor: ground, bordercolor: grid, font: { color: ink } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--soft").trim(), activecolor: ink },
    xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis } };
}

// The lanes come in several divisions of the time; the coarsest that fills the screen is drawn.
const decoded = new Map();
function bytesOf(level) {
  if (!decoded.has(level)) decoded.set(level, Uint8Array.from(atob(level.bytes), (each) => each.charCodeAt(0)));
  return decoded.get(level);
}

function refine(key) {
  const { finer, traces } = plots[key];
  const shown = document.getElementById(key);
  const [from, to] = shown.layout.xaxis.range;
  const first = finer.levels[0];
  const wanted = first.bins * finer.seconds / Math.max(to - from, 1e-9);
  const level = finer.levels.find((each) => each.bins >= wanted) || finer.levels[finer.levels.length - 1];
  const width = finer.seconds / level.bins;
  const begin = Math.max(0, Math.floor(from / width) - 1), end = Math.min(level.bins, Math.ceil(to / width) + 1);
  const parts = traces.length / finer.workers - 1;
  const x = Array.from({ length: end - begin + 1 }, (_, index) => (begin + index) * width);
  const bytes = bytesOf(level);
  const xs = [], ys = [], which = [];
  for (let worker = 0; worker < finer.workers; worker++) {
    const bottom = -worker - finer.height / 2;
    for (let part = 0; part < parts; part++) {
      const start = (worker * parts + part) * level.bins;
      const y = Array.from(bytes.subarray(start + begin, start + end), (each) => bottom + finer.height * each / 255);
      y.push(y[y.length - 1]);
      xs.push(x); ys.push(y); which.push(worker * (parts + 1) + part + 1);
    }
  }
  shown.dataset.bins = String(level.bins);
  return Plotly.restyle(shown, { x: xs, y: ys }, which);
}

function zoom(key, how) {
  const shown = document.getElementById(key);
  if (how === "all") return Plotly.relayout(shown, { "xaxis.autorange": true });
  const [from, to] = shown.layout.xaxis.range.map(Number), middle = (from + to) / 2, half = (to - from) / 2;
  const shift = { left: -half / 2, right: half / 2 }[how] || 0, scale = { in: 0.5, out: 2 }[how] || 1;
  return Plotly.relayout(shown, { "xaxis.range": [middle + shift - half * scale, middle + shift + half * scale] });
}

const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", "0": "all" };

async function draw(key) {
  const { traces, finer, zooms } = plots[key], shown = document.getElementById(key);
  await Plotly.newPlot(shown, traces, themed(plots[key]), config);
  if (zooms) shown.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || shown.layout.xaxis.type === "category") return;
    event.preventDefault();
    zoom(key, keys[event.key]);
  });
  if (finer) shown.on("plotly_relayout", (change) => {
    if (Object.keys(change).some((name) => name.startsWith("xaxis"))) refine(key);
  });
}

for (const button of document.querySelectorAll("[data-zoom]"))
  button.addEventListener("click", () => zoom(button.dataset.plot, button.dataset.zoom));
for (const select of document.querySelectorAll("[data-choose]"))
  select.addEventListener("change", () => {
    const key = select.dataset.choose;
    Plotly.react(document.getElementById(key), plots[key].choices[select.value], themed(plots[key]), config);
  });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const key of Object.keys(plots)) {
    const now = themed(plots[key]);
    Plotly.relayout(document.getElementById(key), { font: now.font, hoverlabel: now.hoverlabel,
      "xaxis.gridcolor": now.xaxis.gridcolor, "yaxis.gridcolor": now.yaxis.gridcolor });
  }
});

// On paper nothing can be opened, and a page is as wide as it is.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = true;
  for (const key of Object.keys(plots)) Plotly.Plots.resize(document.getElementById(key));
});
addEventListener("afterprint", () => {
  for (const each of opened) each.open = false;
  for (const key of Object.keys(plots)) Plotly.Plots.resize(document.getElementById(key));
});

// One after the other, so that the page can be read and scrolled meanwhile.
(async () => {
  for (const key of Object.keys(plots)) {
    await draw(key);
    await new Promise((resolve) => setTimeout(resolve));
  }
  document.body.dataset.ready = "yes";
})();
