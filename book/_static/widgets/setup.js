// Between require.js and embed-amd.js: where the widgets find their fonts, and how they set formulas.

// The modules in embed-amd.js ask for their icon fonts beside themselves; the fonts lie here.
const widgetFiles = document.documentElement.dataset.content_root + "_static/widgets";
require.config({
  paths: {
    "@jupyter-widgets": widgetFiles,
    "@jupyter-widgets/html-manager/dist": widgetFiles,
  },
});

// Widgets call MathJax by its version 2 name; the book has version 3 (loaded by the time this runs).
document.addEventListener("DOMContentLoaded", () => {
  if (window.MathJax && window.MathJax.startup) {
    window.MathJax.Hub = {
      Queue: ([, , node]) =>
        window.MathJax.startup.promise.then(() => window.MathJax.typesetPromise([node])),
    };
  }
});
