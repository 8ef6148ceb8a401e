// The modules in embed-amd.js ask for their icon fonts beside themselves; the fonts lie here.
const widgetFiles = document.documentElement.dataset.content_root + "_static/widgets";
require.config({
  paths: {
    "@jupyter-widgets": widgetFiles,
    "@jupyter-widgets/html-manager/dist": widgetFiles,
  },
});
