// Before anything is painted. A page from a file may have no storage.
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = null;
try { theme = localStorage.getItem("theme"); } catch {}
document.documentElement.dataset.theme = theme || (dark.matches ? "dark" : "light");
addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").onclick = () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch {}
  };
});
