"use strict";
// Values under the pointer of a chart.
for (const figure of document.querySelectorAll(".chart")) {
  const {left, right, series} = JSON.parse(figure.dataset.chart);
  const plot = figure.querySelector(".plot");
  const cursor = plot.querySelector(".cursor");
  const tip = plot.querySelector(".tip");
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const x = left + (event.clientX - box.left) / box.width * (right - left);
    const rows = series.filter((line) => line.points.length).map((line) => {
      const nearest = line.points.reduce((best, point) =>
        Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
      return {line, nearest};
    });
    if (!rows.length) return;
    const step = rows.reduce((best, {nearest}) =>
      Math.abs(nearest[0] - x) < Math.abs(best - x) ? nearest[0] : best, rows[0].nearest[0]);
    const place = (step - left) / (right - left) * 100;
    cursor.style.left = `${place}%`;
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = `step ${Math.round(step)}`;
    tip.append(head);
    for (const {line, nearest} of rows) {
      const row = document.createElement("span");
      const key = document.createElement("i");
      key.style.background = line.color;
      const value = nearest[1] === null ? "–" : Number(nearest[1].toPrecision(4));
      row.append(key, `${line.label}: ${value}`);
      tip.append(row);
    }
    tip.style.left = place > 50 ? "auto" : `calc(${place}% + 0.6rem)`;
    tip.style.right = place > 50 ? `calc(${100 - place}% + 0.6rem)` : "auto";
    cursor.hidden = tip.hidden = false;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
}

// Videos play while they are on the screen, unless the reader wants no motion or has paused them.
const videos = [...document.querySelectorAll("video")];
const button = document.getElementById("toggle-videos");
let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
const visible = new Set();
const update = () => {
  for (const video of videos) {
    if (playing && visible.has(video)) video.play().catch(() => {});
    else video.pause();
  }
  if (button) button.textContent = playing ? "Pause all" : "Play all";
};
if (button) {
  const observer = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
    }
    update();
  });
  for (const video of videos) observer.observe(video);
  button.addEventListener("click", () => { playing = !playing; update(); });
  update();
}
