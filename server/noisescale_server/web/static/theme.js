// Light, dark, or as the system says; before anything is painted, so not a module.
(() => {
  const names = ["system", "light", "dark"];
  const key = "noisescale-theme";
  const read = () => {
    try {
      const kept = localStorage.getItem(key);
      return names.includes(kept) ? kept : "system";
    } catch {
      return "system"; // storage is forbidden: the choice then lasts as long as the page
    }
  };
  let chosen = read();

  const apply = () => {
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    const name = document.getElementById("theme-name");
    if (name) name.textContent = `Theme: ${chosen}. Change`;
    document.dispatchEvent(new Event("themechange"));
  };
  apply();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.hidden = false;
    button.addEventListener("click", () => {
      chosen = names[(names.indexOf(chosen) + 1) % names.length];
      try {
        localStorage.setItem(key, chosen);
      } catch {
        // as above
      }
      apply();
    });
    apply();
  });
})();
