"use strict";
const plots = JSON.parse(document.getElementById("plots").textContent);
const config = { responsive: true, displaylogo: false,
  modeBarButtons: [["toImage", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]] };

// The legend is above the plot, and does not reduce its height.
function fitted({ layout, traces }) {
  const narrow = window.innerWidth < 600;
  const lines = Math.ceil(traces.filter((trace) => trace.showlegend !== false).length / (narrow ? 3 : 9));
  const small = narrow && { font: { ...layout.font, size: 11 }, margin: { ...layout.margin, l: 40 } };
  return { ...layout, height: layout.height + 20 * (lines - 1), ...small };
}

// By key: the factor of the visible width, and the part of it by which the middle moves.
const moves = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25] };

function move(event) {
  const shown = event.currentTarget, { type, range } = shown.layout.xaxis;
  if (!(event.key in moves || event.key === "0") || event.ctrlKey || event.metaKey || type === "category") return;
  event.preventDefault();
  if (event.key === "0") return Plotly.relayout(shown, { "xaxis.autorange": true });
  const [scale, shift] = moves[event.key], [from, to] = range.map(Number), width = to - from;
  const middle = (from + to) / 2 + shift * width, half = scale * width / 2;
  Plotly.relayout(shown, { "xaxis.range": [middle - half, middle + half] });
}

for (const select of document.querySelectorAll("[data-plot]"))
  select.addEventListener("change", () =>
    Plotly.relayout(document.getElementById(select.dataset.plot), { "xaxis.range": JSON.parse(select.value) }));

// On paper nothing can be opened, and the width of a page is fixed.
let opened = [];
function print(open) {
  if (open) opened = [...document.querySelectorAll("details:not([open])")];
  for (const each of opened) each.open = open;
  for (const key of Object.keys(plots)) Plotly.Plots.resize(document.getElementById(key));
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));

// One after the other, so that the page can already be read and scrolled.
(async () => {
  for (const [key, plot] of Object.entries(plots)) {
    const shown = document.getElementById(key);
    await Plotly.newPlot(shown, plot.traces, fitted(plot), config);
    shown.addEventListener("keydown", move);
    await new Promise((resolve) => setTimeout(resolve));
  }
  document.body.dataset.ready = "yes";
})();
