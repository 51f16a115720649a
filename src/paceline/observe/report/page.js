"use strict";
(() => {
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const isNarrow = () => window.innerWidth < 760;
  let isDrawn = false;

  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const hasLegend = (figure) => figure.layout.showlegend !== false && figure.data.some((trace) => trace.type !== "heatmap");

  // A long name keeps its head and its tail, where names of runs differ.
  function shortened(name, most) {
    return name && name.length > most ? `${name.slice(0, most / 2 - 1)}...${name.slice(2 - most / 2)}` : name;
  }

  // On a phone a legend has room for few letters; hovering shows the same.
  const dataOf = (figure) =>
    isNarrow() ? figure.data.map((trace) => ({ ...trace, name: shortened(trace.name, 36) })) : figure.data;

  // Names of stages are written only where all of them have room.
  function notesOf(figure) {
    const notes = figure.layout.annotations || [];
    const longest = Math.max(0, ...notes.map((note) => note.text.length));
    const width = document.getElementById(figure.name).clientWidth - 80;
    return longest * 6 * notes.length <= width ? notes : [];
  }

  // What all plots share; what is special about one comes from its own layout.
  function layoutOf(figure) {
    const ink = color("--ink"), soft = color("--soft"), grid = color("--grid");
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { color: soft }, automargin: true };
    const own = figure.layout;
    return {
      ...own,
      annotations: notesOf(figure),
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      margin: { l: isNarrow() ? 44 : 56, r: 12, t: hasLegend(figure) ? 34 : 10, b: 40 },
      hovermode: own.hovermode || "closest",
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--edge"), font: { color: ink } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { color: soft } },
      xaxis: { ...axis, ...own.xaxis },
      yaxis: { ...axis, ...own.yaxis },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: color("--accent") },
      dragmode: isNarrow() ? false : "zoom",
    };
  }

  const config = { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  function draw() {
    return Promise.all(figures.map((figure) => Plotly.react(figure.name, dataOf(figure), layoutOf(figure), config)));
  }

  function setTheme(isDark) {
    root.dataset.theme = isDark ? "dark" : "light";
    if (isDrawn) draw();
  }

  function fail(why) {
    const note = document.getElementById("failed");
    note.textContent = why;
    note.hidden = false;
  }

  // plotly is kept compressed in the page, and unpacked by the browser itself.
  async function unpack() {
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(plain).text();
    document.head.append(script);
    script.remove(); // it has run; nobody needs its text twice
  }

  // A page that is served asks for something new, and loads itself anew when there is; a file has no version.
  function follow() {
    const { version, refresh } = document.body.dataset;
    if (!version) return;
    const timer = setInterval(async () => {
      if (document.hidden) return;
      try {
        const state = await (await fetch("/state", { cache: "no-store" })).json();
        if (state.version !== version) location.reload();
        else if (!state.goes_on) clearInterval(timer);
      } catch {
        clearInterval(timer);
        fail(document.body.dataset.ended);
      }
    }, 1000 * Number(refresh));
  }

  // A theme that was chosen outlives a reload.
  const chosen = () => { try { return sessionStorage.getItem("theme"); } catch { return null; } };
  const keep = (theme) => { try { sessionStorage.setItem("theme", theme); } catch { /* a page without storage */ } };

  follow();
  setTheme((chosen() || (dark.matches ? "dark" : "light")) === "dark");
  dark.addEventListener("change", () => setTheme(dark.matches));
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme !== "dark");
    keep(root.dataset.theme);
  });
  document.querySelectorAll("button.log").forEach((button) =>
    button.addEventListener("click", () => {
      const figure = figures.find((each) => each.name === button.dataset.for);
      const isLog = button.classList.toggle("on");
      figure.layout.yaxis = { ...figure.layout.yaxis, type: isLog ? "log" : "linear" };
      Plotly.react(figure.name, dataOf(figure), layoutOf(figure), config);
    })
  );

  if (typeof DecompressionStream === "undefined") {
    fail(document.body.dataset.old);
    return;
  }
  unpack()
    .then(draw)
    .then(() => {
      isDrawn = true;
      // A plot follows its card, whatever made that wider or narrower.
      const follow = new ResizeObserver((seen) => seen.forEach((each) => Plotly.Plots.resize(each.target)));
      figures.forEach((figure) => follow.observe(document.getElementById(figure.name)));
      root.dataset.drawn = String(figures.length);
    })
    .catch((error) => {
      fail(`The plots could not be drawn: ${error}`);
      console.error(error);
    });
})();
