// Browsers run no search on pages opened from a folder: say how to serve them.
if (location.protocol === "file:") {
  document.addEventListener("DOMContentLoaded", () => {
    const note = document.createElement("p");
    note.className = "served";
    note.textContent = "Search needs a server: python -m http.server -d build/docs/site";
    document.body.prepend(note);
  });
}
