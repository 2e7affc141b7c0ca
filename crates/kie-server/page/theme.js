// Sets the theme before the first paint; a classic script, since modules run after it.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("kie-theme");
    } catch {
      return null; // storage may be forbidden
    }
  };
  const apply = () => {
    document.documentElement.dataset.theme = stored() ?? (dark.matches ? "dark" : "light");
  };
  dark.addEventListener("change", apply);
  apply();
})();
