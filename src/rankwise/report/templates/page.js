// Draws the page, again whenever its colors or its width change.
const redraw = () => Promise.all(drawers.map((draw) => draw()));
await redraw();
for (const start of starters) start();
for (const query of [dark, narrow, wide]) query.addEventListener("change", redraw);
document.documentElement.dataset.ready = "true";
