// The field for a photo; only a page that `dml look --serve` serves has one.
"use strict";

const LARGEST_PHOTO = 20 * 2 ** 20; // bytes, as the server

async function askFor(photo) {
  const answer = document.getElementById("answer");
  if (photo.size > LARGEST_PHOTO) {
    answer.textContent = "The photo is larger than 20 MB: give a smaller one.";
    return;
  }
  answer.textContent = "searching ...";
  try {
    const reply = await fetch("search", { method: "POST", headers: { "X-Dml-Look": "1" }, body: photo });
    const said = await reply.json();
    if (!reply.ok) { answer.textContent = said.error; return; }
    const query = element("img");
    query.src = URL.createObjectURL(photo);
    query.onload = () => URL.revokeObjectURL(query.src);
    answer.replaceChildren(query);
    for (const [i, s] of said.found) answer.append(figure(i, "plain", className(i), s.toFixed(3)));
  } catch {
    answer.textContent = "The server does not answer: is dml look --serve still running?";
  }
}

if (document.body.dataset.serve) {
  const field = document.getElementById("photo");
  field.hidden = false;
  field.querySelector("input").addEventListener("change", (event) => {
    if (event.target.files.length) askFor(event.target.files[0]);
  });
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      field.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files.length) askFor(event.dataTransfer.files[0]);
    });
  }
  document.addEventListener("paste", (event) => {
    const [photo] = event.clipboardData.files;
    if (photo) askFor(photo);
  });
}
