// Before anything is painted: the theme that was chosen, if one was. The rest is lib/theme.js.
try {
  const chosen = localStorage.getItem("pippin.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // A browser that keeps nothing: the system's theme.
}
