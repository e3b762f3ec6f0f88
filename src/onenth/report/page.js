"use strict";
(function () {
  const recording = JSON.parse(document.getElementById("recording").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const ink = dark ? "#e6e9ed" : "#1b1f24";
  const grid = dark ? "#343a42" : "#e3e7ec";
  const config = { responsive: true, displayModeBar: false };
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];

  function bytes(count) {
    let value = Math.abs(count);
    let unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return (count < 0 ? "-" : "") + Number(value.toPrecision(3)) + " " + units[unit];
  }

  function layout(more) {
    const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
    return Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
      margin: { l: 70, r: 20, t: 30, b: 45 }, hoverlabel: { namelength: -1 },
      legend: { orientation: "h", y: -0.2, yanchor: "top", traceorder: "normal" },
      xaxis: Object.assign({ title: { text: "event" } }, axis),
      yaxis: Object.assign({ tickformat: ".3~s", ticksuffix: "B", rangemode: "tozero" }, axis),
    }, more);
  }

  function bands() {
    const width = recording.events || 1;
    const shapes = [];
    const labels = [];
    recording.turns.forEach(function (turn, index) {
      shapes.push({
        type: "rect", xref: "x", yref: "paper", x0: turn.start, x1: turn.end, y0: 0, y1: 1, layer: "below",
        line: { width: 0 }, fillcolor: index % 2 ? "rgba(128,128,128,0.12)" : "rgba(128,128,128,0.03)",
      });
      if ((turn.end - turn.start) / width > 0.05) {
        labels.push({
          x: (turn.start + turn.end) / 2, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false,
          text: turn.name, font: { size: 11 },
        });
      }
    });
    return { shapes: shapes, labels: labels };
  }

  function peakLabel() {
    const late = recording.peak.at > 0.7 * recording.events;
    const early = recording.peak.at < 0.3 * recording.events;
    return {
      x: recording.peak.at, y: recording.peak.bytes, text: "peak " + bytes(recording.peak.bytes) + ", " +
        recording.peak.moment, showarrow: true, arrowhead: 2, arrowcolor: ink, ax: late ? -60 : early ? 60 : 0, ay: -28,
      xanchor: late ? "right" : early ? "left" : "center", bgcolor: dark ? "#15181c" : "#ffffff", borderpad: 2,
    };
  }

  function area() {
    const marks = bands();
    const traces = recording.owners.filter(function (owner) { return owner.peak > 0; }).map(function (owner) {
      return {
        name: owner.owner, x: recording.positions, y: owner.series, stackgroup: "held", mode: "lines",
        line: { shape: "hv", width: 0.5, color: owner.color }, fillcolor: owner.color,
        text: owner.series.map(bytes), hovertemplate: "%{text}",
      };
    });
    traces.push({
      name: "in all", x: recording.positions, y: recording.totals, mode: "lines", showlegend: false,
      line: { shape: "hv", width: 1, color: ink },
      text: recording.totals.map(function (total, index) { return bytes(total) + " in " + recording.phases[index]; }),
      hovertemplate: "%{text}",
    });
    Plotly.newPlot("area", traces, layout({
      hovermode: "x unified", shapes: marks.shapes, annotations: marks.labels.concat([peakLabel()]),
      margin: { l: 70, r: 20, t: 46, b: 45 },
    }), config);
  }

  function reserved() {
    const lines = [["reserved", recording.reserved, "#D55E00"], ["allocated", recording.allocated, "#0072B2"]];
    const traces = lines.map(function (line) {
      return {
        name: line[0], x: recording.positions, y: line[1], mode: "lines", line: { shape: "hv", width: 2, color: line[2] },
        text: line[1].map(bytes), hovertemplate: "%{text}",
      };
    });
    const lost = recording.reserved.map(function (count, index) { return count - recording.allocated[index]; });
    traces.push({
      name: "fragmentation", x: recording.positions, y: lost, mode: "lines",
      line: { shape: "hv", width: 1.5, color: "#CC79A7", dash: "dot" }, text: lost.map(bytes), hovertemplate: "%{text}",
    });
    const limits = recording.capacity === null ? [] : [{
      type: "line", xref: "paper", x0: 0, x1: 1, y0: recording.capacity, y1: recording.capacity,
      line: { color: ink, dash: "dash", width: 1 },
    }];
    Plotly.newPlot("reserved", traces, layout({ hovermode: "x unified", shapes: bands().shapes.concat(limits) }), config);
  }

  function difference(owner) {
    if (owner.expected === null) { return ""; }
    const beyond = owner.peak - owner.expected;
    return beyond === 0 ? "equal to the byte" : (beyond > 0 ? "+" : "") + bytes(beyond);
  }

  function bars() {
    const shown = recording.owners.filter(function (owner) { return owner.peak > 0 || owner.expected; }).reverse();
    const names = shown.map(function (owner) { return owner.owner; });
    const traces = [{
      name: "equation", type: "bar", orientation: "h", y: names, x: shown.map(function (o) { return o.expected; }),
      text: shown.map(difference), textposition: "outside", cliponaxis: false, hovertemplate: "equation %{customdata}",
      customdata: shown.map(function (o) { return o.expected === null ? "" : bytes(o.expected); }),
      marker: { color: "rgba(128,128,128,0.25)", line: { color: ink, width: 1 } },
    }, {
      name: "measured", type: "bar", orientation: "h", y: names, x: shown.map(function (owner) { return owner.peak; }),
      marker: { color: shown.map(function (owner) { return owner.color; }) },
      customdata: shown.map(function (o) { return bytes(o.peak); }), hovertemplate: "measured %{customdata}",
    }];
    const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true };
    Plotly.newPlot("bars", traces, layout({
      barmode: "group", height: 90 + 34 * names.length, legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "reversed" },
      xaxis: Object.assign({ tickformat: ".3~s", ticksuffix: "B" }, axis), yaxis: axis, margin: { l: 70, r: 130, t: 40, b: 40 },
    }), config);
  }

  function treemap() {
    const tree = recording.tree;
    Plotly.newPlot("treemap", [{
      type: "treemap", branchvalues: "total", ids: tree.ids, labels: tree.labels, parents: tree.parents,
      values: tree.values, text: tree.values.map(bytes), textinfo: "label+text", hovertemplate: "%{id}<br>%{text}<extra></extra>",
      marker: { colors: tree.values, colorscale: "YlOrBr", reversescale: true, line: { width: 1 } },
    }], layout({ margin: { l: 0, r: 0, t: 26, b: 0 } }), config);
  }

  function ranks() {
    const names = recording.ranks.map(function (rank) { return "rank " + rank.rank; });
    const traces = recording.owners.filter(function (owner) { return owner.peak > 0; }).map(function (owner) {
      const held = recording.ranks.map(function (rank) { return rank.owners[owner.owner] || 0; });
      return {
        name: owner.owner, type: "bar", x: names, y: held, marker: { color: owner.color }, customdata: held.map(bytes),
        hovertemplate: "%{customdata}",
      };
    });
    const axis = { gridcolor: grid, automargin: true };
    Plotly.newPlot("ranks", traces, layout({ barmode: "stack", xaxis: Object.assign({ type: "category" }, axis) }), config);
  }

  const charts = { area: area, reserved: reserved, bars: bars, treemap: treemap, ranks: ranks };
  Object.keys(charts).forEach(function (id) { if (document.getElementById(id)) { charts[id](); } });
}());
