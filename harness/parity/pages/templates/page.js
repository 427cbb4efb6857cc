"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  const plots = [];

  for (const chart of data.charts) {
    const div = document.getElementById("chart-" + chart.name);
    const traces = chart.traces.map((trace) => {
      const y = data.pool[trace.y];
      const full = { type: "scatter", ...trace, x: data.pool[trace.x], y };
      if (chart.is_log) {
        full.text = y.map((value) => (value === null ? "" : value <= data.floor ? "identical" : value.toExponential(2)));
        full.hovertemplate = "%{text}";
      }
      return full;
    });
    // A finger scrolls the page; a mouse zooms.
    const layout = { ...chart.layout, dragmode: touch ? false : "zoom", autosize: true, font: { size: 12 } };
    // Named one by one: Plotly's own choice has a button that uploads the chart.
    const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
    const config = {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch ? false : "hover",
      modeBarButtons: buttons,
      plotlyServerURL: "",
    };
    Plotly.newPlot(div, traces, layout, config);
    plots.push(div);
  }

  const boxes = [...document.querySelectorAll(".legend input")];
  const groups = [...document.querySelectorAll(".choose button")];
  const show = () => {
    const shown = new Set(boxes.filter((box) => box.checked).map((box) => box.dataset.cell));
    for (const div of plots) {
      Plotly.restyle(div, { visible: div.data.map((trace) => !trace.meta || shown.has(trace.meta)) });
    }
  };
  for (const box of boxes) box.addEventListener("change", show);
  for (const button of groups) {
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = !button.dataset.group || box.dataset.group === button.dataset.group;
      for (const other of groups) other.setAttribute("aria-pressed", String(other === button));
      show();
    });
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        // Pages from a disk may not be given the clipboard: the text is selected instead, for the keyboard.
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
        return;
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }

  const open = () => {
    const cell = location.hash.startsWith("#cell-") && document.getElementById(location.hash.slice(1));
    if (cell) cell.open = true;
  };
  addEventListener("hashchange", open);
  open();

  // Charts have the width of the screen: on paper they get that of A4 within its margins, and folded cells are unfolded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const one of folded) one.open = true;
    for (const div of plots) Plotly.relayout(div, { width: 640, height: 210 });
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
    for (const div of plots) Plotly.relayout(div, { width: null, height: null, autosize: true });
  });
  document.documentElement.dataset.ready = "true";
})();
