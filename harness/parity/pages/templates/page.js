"use strict";
(() => {
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch {
        // A page opened from disk may have no access to the clipboard: select the text to copy it by keyboard.
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
        return;
      }
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }

  const open = () => {
    const cell = location.hash.startsWith("#cell-") && document.getElementById(location.hash.slice(1));
    if (cell) cell.open = true;
  };
  addEventListener("hashchange", open);
  open();

  // Unfold all cells for printing.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const one of folded) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
  });
  document.documentElement.dataset.ready = "true";
})();
